// For every processor: four lanes, which compilers map to the vectors that all 64-bit processors have. They are an array here. With a
// vector type, as attention has it, GCC fuses other multiplications with additions where it divides rows otherwise.
#include "linear.h"
#include "types.h"

#include <cmath>
#include <cstring>

namespace adtp
{
namespace
{

struct Vector
{
    static constexpr int32_t kLanes = 4;
    float value[kLanes];

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
    static Vector round(Vector x) // half to even
    {
        return each([=](int32_t i) { return ::rintf(x.value[i]); });
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
};

inline void storeBytes(uint8_t* p, Vector x, int32_t n) // whole numbers from 0; above 255 they become that
{
    for (int32_t i = 0; i < n; ++i)
    {
        p[i] = static_cast<uint8_t>(x.value[i] < 255.0F ? x.value[i] : 255.0F);
    }
}

inline void storeBf16(uint8_t* p, Vector x, int32_t n)
{
    for (int32_t i = 0; i < n; ++i)
    {
        uint32_t const bits = uint32_t{toBfloat(x.value[i])} << 16;
        std::memcpy(p + 4 * i, &bits, sizeof(bits));
    }
}

inline Vector min(Vector x, Vector y)
{
    return Vector::each([=](int32_t i) { return x.value[i] < y.value[i] ? x.value[i] : y.value[i]; });
}

inline Vector root(Vector x)
{
    return Vector::each([=](int32_t i) { return ::sqrtf(x.value[i]); });
}

struct Bf16
{
    static constexpr int32_t kRows = 4;
    static constexpr int32_t kVectors = 4;
    static constexpr int64_t kRowBytes = 8;
    struct Row
    {
        float even, odd;
    };
    struct Weights
    {
        Vector even, odd;
    };
    typedef Vector Sums;

    static Sums zero() { return Vector::of(0.0F); }
    static float real(uint8_t const* p)
    {
        uint16_t half;
        std::memcpy(&half, p, sizeof(half));
        uint32_t const bits = static_cast<uint32_t>(half) << 16;
        float x;
        std::memcpy(&x, &bits, sizeof(x));
        return x;
    }
    static Weights load(uint8_t const* p)
    {
        return {Vector::each([=](int32_t i) { return real(p + 4 * i); }), Vector::each([=](int32_t i) { return real(p + 4 * i + 2); })};
    }
    static Row broadcast(uint8_t const* p)
    {
        Row x;
        std::memcpy(&x, p, sizeof(x));
        return x;
    }
    static Sums dot(Sums sums, Row x, Weights w)
    {
        return Vector::multiplyAdd(Vector::of(x.odd), w.odd, Vector::multiplyAdd(Vector::of(x.even), w.even, sums));
    }
    static Vector value(Sums sums) { return sums; }
};

struct Int8
{
    static constexpr int32_t kRows = 4;
    static constexpr int32_t kVectors = 4;
    struct Sums
    {
        int32_t value[Vector::kLanes];
    };
    struct Weights
    {
        int8_t value[Vector::kLanes][4];
    };
    struct Row
    {
        uint8_t value[4];
    };

    static Sums zero() { return {}; }
    static Weights load(uint8_t const* p)
    {
        Weights w;
        std::memcpy(w.value, p, sizeof(w.value));
        return w;
    }
    static Row broadcast(uint8_t const* p)
    {
        Row x;
        std::memcpy(x.value, p, sizeof(x.value));
        return x;
    }
    static Sums dot(Sums sums, Row const& x, Weights const& w)
    {
        for (int32_t i = 0; i < Vector::kLanes; ++i)
        {
            for (int32_t j = 0; j < 4; ++j)
            {
                sums.value[i] += x.value[j] * w.value[i][j];
            }
        }
        return sums;
    }
    static Vector value(Sums const& sums, int32_t const* columnSums, int32_t some, int32_t zero)
    {
        return Vector::each([&](int32_t i) { return static_cast<float>(sums.value[i] - (i < some ? columnSums[i] * zero : 0)); });
    }
};

} // namespace
} // namespace adtp

#include "linear.inl"

namespace adtp
{
extern LinearLevel const kLinearPortable;
LinearLevel const kLinearPortable{"portable", Bf16::kRowBytes, kAnyTile, 1, 1, kCacheBytes, convert, multiply, addNorm};
} // namespace adtp
