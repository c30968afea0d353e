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
    current.reverse = isOn("ADTP_EMULATOR_REVERSE");
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

int exponentOf(double value)
{
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<int>(bits >> 52 & 0x7FF) - 1023;
}

double powerOfTwo(int exponent)
{
    uint64_t const bits = static_cast<uint64_t>(exponent + 1023) << 52;
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

float towardsZero(double value)
{
    float const rounded = static_cast<float>(value);
    return std::fabs(double{rounded}) > std::fabs(value) ? std::nextafter(rounded, 0.0F) : rounded;
}

// A sum as tensor cores are reported to form it (Fasi, Higham, Mikaitis, Pranesh 2021, "Numerical behavior of NVIDIA
// tensor cores"): terms are aligned to the largest exponent, cut there, and the sum is cut to fp32. 24 bits below the
// largest exponent are kept.
float truncatedSum(double const* terms, int count)
{
    constexpr int kNone = -1023; // of a zero
    int top = kNone;
    double plain = 0;
    for (int i = 0; i < count; ++i)
    {
        top = std::max(top, exponentOf(terms[i]));
        plain += terms[i];
    }
    if (!std::isfinite(plain))
    {
        return static_cast<float>(plain);
    }
    if (top == kNone)
    {
        return 0;
    }
    double const scale = powerOfTwo(24 - top);
    int64_t sum = 0;
    for (int i = 0; i < count; ++i)
    {
        sum += static_cast<int64_t>(terms[i] * scale); // cuts towards zero
    }
    return towardsZero(static_cast<double>(sum) * powerOfTwo(top - 24));
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

namespace
{

// sums += left * right, exactly and rounded once. All sums of a row go along together, which is faster than one by one.
void multiplyExactly(float (&sums)[16][8], float const (&left)[16][16], float const (&right)[8][16], int k)
{
    double columns[16][8];
    for (int i = 0; i < k; ++i)
    {
        for (int n = 0; n < 8; ++n)
        {
            columns[i][n] = right[n][i];
        }
    }
    for (int m = 0; m < 16; ++m)
    {
        double row[8];
        std::copy(sums[m], sums[m] + 8, row);
        for (int i = 0; i < k; ++i)
        {
            double const factor = left[m][i];
            for (int n = 0; n < 8; ++n)
            {
                row[n] += factor * columns[i][n];
            }
        }
        for (int n = 0; n < 8; ++n)
        {
            sums[m][n] = static_cast<float>(row[n]);
        }
    }
}

} // namespace

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
    if (!options().truncate)
    {
        multiplyExactly(sums, left, right, k);
    }
    for (int m = 0; m < 16 && options().truncate; ++m)
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
