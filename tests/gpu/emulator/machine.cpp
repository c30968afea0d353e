// Options, warps, tensor cores and matrix loads.
#include "machine.h"

#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace emulator
{
namespace
{

Options current;

bool isOn(char const* name)
{
    char const* const value = std::getenv(name);
    return value && *value && std::string(value) != "0";
}

} // namespace

void fault(std::string const& what)
{
    throw Fault(what);
}

std::string where(uint32_t block, int warp, std::string const& instruction)
{
    std::string const who = warp < 0 ? "" : ", warp " + std::to_string(warp);
    return " [block " + std::to_string(block) + who + ": " + instruction + "]";
}

Options const& options()
{
    return current;
}

void readOptions()
{
    current.earlyCopies = isOn("ADTP_EMULATOR_EARLY");
    current.truncate = isOn("ADTP_EMULATOR_TRUNCATE");
    current.reverseWarps = isOn("ADTP_EMULATOR_REVERSE");
    current.races = !isOn("ADTP_EMULATOR_NO_RACES");
    current.forgive = isOn("ADTP_EMULATOR_FORGIVE");
    char const* const most = std::getenv("ADTP_EMULATOR_MOST");
    current.most = most ? std::strtoull(most, nullptr, 10) : Options{}.most;
}

void Warp::restart(int warp)
{
    id = warp;
    next = 0;
    atBarrier = done = false;
    groups.clear();
    openGroup.clear();
}

namespace
{

// A sum as tensor cores are reported to form it (Fasi, Higham, Mikaitis, Pranesh 2021, "Numerical behavior of NVIDIA
// tensor cores"): terms are aligned to the largest exponent, cut there, and the sum is cut to fp32. 24 bits below the
// largest exponent are kept.
float truncatedSum(double const* terms, int count)
{
    constexpr int kNone = -2000;
    int top = kNone;
    for (int i = 0; i < count; ++i)
    {
        if (!std::isfinite(terms[i]))
        {
            double sum = 0;
            for (int j = 0; j < count; ++j)
            {
                sum += terms[j];
            }
            return static_cast<float>(sum);
        }
        if (terms[i] != 0)
        {
            top = std::max(top, std::ilogb(terms[i]));
        }
    }
    if (top == kNone)
    {
        return 0;
    }
    double const unit = std::ldexp(1.0, top - 24);
    double sum = 0;
    for (int i = 0; i < count; ++i)
    {
        sum += std::trunc(terms[i] / unit) * unit;
    }
    if (sum == 0)
    {
        return 0;
    }
    double const last = std::ldexp(1.0, std::max(std::ilogb(sum), -126) - 23);
    return static_cast<float>(std::trunc(sum / last) * last);
}

// What a register holds of matrix row or column: two 16-bit numbers, or one tf32, whose lower 13 bits are not read.
int unpack(Kind kind, uint32_t bits, float* out)
{
    if (kind == Kind::kTF32)
    {
        out[0] = asFloat(bits & 0xFFFFE000);
        return 1;
    }
    for (int half = 0; half < 2; ++half)
    {
        auto const part = static_cast<uint16_t>(bits >> (16 * half));
        out[half] = kind == Kind::kHALF ? fromHalf(part) : fromBf16(part);
    }
    return 2;
}

} // namespace

float dot(float c, float const* a, float const* b, int count, int step)
{
    if (!options().truncate)
    {
        double sum = c;
        for (int i = 0; i < count; ++i)
        {
            sum += double{a[i]} * b[i];
        }
        return static_cast<float>(sum);
    }
    double terms[65];
    for (int first = 0; first < count; first += step)
    {
        terms[0] = c;
        for (int i = 0; i < step; ++i)
        {
            terms[i + 1] = double{a[first + i]} * b[first + i];
        }
        c = truncatedSum(terms, step + 1);
    }
    return c;
}

// Lane 4 * g + t holds: of A rows g and g + 8; of B column g; of C and D rows g and g + 8, columns 2 t and 2 t + 1.
// 16-bit registers hold 2 neighbours along K, from 2 t on, the later registers 8 further; tf32 ones t and t + 4.
void mma(Kind kind, std::array<Lanes*, 4> d, std::array<Lanes const*, 4> a, std::array<Lanes const*, 2> b,
    std::array<Lanes const*, 4> c)
{
    float left[16][16], right[8][16], sums[16][8];
    bool const isTf32 = kind == Kind::kTF32;
    int const k = isTf32 ? 8 : 16;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        int const g = lane >> 2, t = lane & 3;
        int const column = isTf32 ? t : 2 * t;
        for (int i = 0; i < 4; ++i)
        {
            unpack(kind, (*a[i])[lane], &left[g + (i & 1) * 8][column + (i >> 1) * (k / 2)]);
            sums[g + (i >> 1) * 8][t * 2 + (i & 1)] = asFloat((*c[i])[lane]);
        }
        for (int i = 0; i < 2; ++i)
        {
            unpack(kind, (*b[i])[lane], &right[g][column + i * (k / 2)]);
        }
    }
    for (int m = 0; m < 16; ++m)
    {
        for (int n = 0; n < 8; ++n)
        {
            sums[m][n] = dot(sums[m][n], left[m], right[n], k, isTf32 ? 4 : 8);
        }
    }
    for (int lane = 0; lane < kLanes; ++lane)
    {
        for (int i = 0; i < 4; ++i)
        {
            (*d[i])[lane] = asBits(sums[(lane >> 2) + (i >> 1) * 8][(lane & 3) * 2 + (i & 1)]);
        }
    }
}

void loadMatrices(SharedMemory& shared, int warp, Lanes const& addresses, uint32_t offset, int count, bool transposed,
    std::array<Lanes*, 4> out)
{
    uint16_t matrices[4][8][8];
    for (int i = 0; i < count; ++i)
    {
        for (int row = 0; row < 8; ++row)
        {
            std::memcpy(matrices[i][row], shared.read(addresses[i * 8 + row] + offset, 16, warp, "ldmatrix"), 16);
        }
    }
    for (int i = 0; i < count; ++i)
    {
        auto const& matrix = matrices[i];
        for (int lane = 0; lane < kLanes; ++lane)
        {
            int const g = lane >> 2, t = (lane & 3) * 2;
            uint32_t const first = transposed ? matrix[t][g] : matrix[g][t];
            uint32_t const second = transposed ? matrix[t + 1][g] : matrix[g][t + 1];
            (*out[i])[lane] = first | second << 16;
        }
    }
}

} // namespace emulator
