// For every processor: four lanes, which compilers map to the vectors that all 64-bit processors have.
#include <cstdint>
#include <cstring>

namespace adtp
{
namespace
{

struct Vector
{
    static constexpr int32_t kLanes = 4;
#ifdef __GNUC__
    typedef float Lanes __attribute__((vector_size(16)));
#else
    typedef float Lanes[4];
#endif
    Lanes value;

    template <typename Function>
    static Vector each(Function function)
    {
        Vector made;
        for (int32_t i = 0; i < kLanes; ++i)
        {
            made.value[i] = function(i);
        }
        return made;
    }
    static Vector of(float x)
    {
        return each([=](int32_t) { return x; });
    }
    static Vector load(float const* p)
    {
        return each([=](int32_t i) { return p[i]; });
    }
    static Vector loadSome(float const* p, int32_t n)
    {
        return each([=](int32_t i) { return i < n ? p[i] : 0.0F; });
    }
    static void store(float* p, Vector x) { storeSome(p, x, kLanes); }
    static void storeSome(float* p, Vector x, int32_t n)
    {
        for (int32_t i = 0; i < n; ++i)
        {
            p[i] = x.value[i];
        }
    }
    static Vector max(Vector x, Vector y) // y where one is NaN
    {
        return each([=](int32_t i) { return x.value[i] > y.value[i] ? x.value[i] : y.value[i]; });
    }
    static Vector multiplyAdd(Vector x, Vector y, Vector z)
    {
        return each([=](int32_t i) { return x.value[i] * y.value[i] + z.value[i]; });
    }
    static Vector round(Vector x) // to the nearest whole number, below 2^22
    {
        constexpr float ones = 12582912.0F; // 1.5 * 2^23: numbers of its size have no fraction
        return each([=](int32_t i) { return (x.value[i] + ones) - ones; });
    }
    static Vector timesPowerOf2(Vector x, Vector power)
    {
        return each([=](int32_t i) {
            float const number = x.value[i];
            uint32_t bits = 0;
            std::memcpy(&bits, &number, sizeof(bits));
            // A power that is NaN has a number that is NaN: it stays.
            bits += number == number ? static_cast<uint32_t>(static_cast<int32_t>(power.value[i])) << 23 : 0;
            float made = 0;
            std::memcpy(&made, &bits, sizeof(made));
            return made;
        });
    }
    static void transpose(Vector (&x)[kLanes])
    {
        for (int32_t i = 0; i < kLanes; ++i)
        {
            for (int32_t j = 0; j < i; ++j)
            {
                float const held = x[i].value[j];
                x[i].value[j] = x[j].value[i];
                x[j].value[i] = held;
            }
        }
    }
    friend Vector operator-(Vector x, Vector y)
    {
        return each([=](int32_t i) { return x.value[i] - y.value[i]; });
    }
    friend Vector operator+(Vector x, Vector y)
    {
        return each([=](int32_t i) { return x.value[i] + y.value[i]; });
    }
    friend Vector operator*(Vector x, Vector y)
    {
        return each([=](int32_t i) { return x.value[i] * y.value[i]; });
    }
    friend Vector operator/(Vector x, Vector y)
    {
        return each([=](int32_t i) { return x.value[i] / y.value[i]; });
    }
};

constexpr int32_t kSums = 12;

} // namespace
} // namespace adtp

#include "attention.inl"

namespace adtp
{
Level const kPortable{"portable", kVectors * kLanes, scratch, attend, nullptr};
} // namespace adtp
