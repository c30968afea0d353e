// Moves, selection, parameters, and changes of an integer's width.
#include "ptx.h"

namespace emulator
{
namespace
{

template <typename F>
Operation widened(F f)
{
    return {"dw", [f](Context const& c, uint32_t) {
                for (int lane = 0; lane < kLanes; ++lane)
                {
                    c.wide(0)[lane] = f(c.word(1)[lane]);
                }
            }};
}

void select(Context const& c, uint32_t)
{
    uint32_t const isFirst = c.predicate(3);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        c.word(0)[lane] = isFirst >> lane & 1 ? c.word(1)[lane] : c.word(2)[lane];
    }
}

template <typename T>
T parameter(Context const& c)
{
    T value;
    if (c.operand(1).index + sizeof value > c.parameters.size())
    {
        fault("ld.param: after the last parameter");
    }
    std::memcpy(&value, &c.parameters[c.operand(1).index], sizeof value);
    return value;
}

} // namespace

void addMoves(Operations& table)
{
    using U = uint32_t;
    // "Data Movement and Conversion Instructions": mov, ld.param, cvt. "Comparison and Selection Instructions": selp.
    table["mov.b32"] = table["mov.u32"] = unary("ww", [](U a) { return a; });
    table["mov.b16"] = table["mov.u16"] = unary("hh", [](U a) { return a; });
    table["mov.b32.apart"] = {"hhw", [](Context const& c, uint32_t) {
                                  Lanes const whole = c.word(2);
                                  for (int lane = 0; lane < kLanes; ++lane)
                                  {
                                      c.word(0)[lane] = whole[lane] & 0xFFFF;
                                      c.word(1)[lane] = whole[lane] >> 16;
                                  }
                              }};
    table["mov.b32.together"] = binary("whh", [](U low, U high) { return low | high << 16; });
    table["mov.b64"] = table["mov.u64"] = {"dd", [](Context const& c, uint32_t) { c.wide(0) = c.wide(1); }};
    table["mov.pred"] = {"pp", [](Context const& c, uint32_t) { c.predicate(0) = c.predicate(1); }};
    table["selp.b16"] = {"hhhp", select};
    table["selp.b32"] = table["selp.f32"] = {"wwwp", select};
    table["ld.param.b32"] = {"wP", [](Context const& c, uint32_t) { c.word(0).fill(parameter<U>(c)); }};
    table["ld.param.s32"] = {"dP", [](Context const& c, uint32_t) {
                                 c.wide(0).fill(static_cast<uint64_t>(int64_t{asSigned(parameter<U>(c))}));
                             }};
    table["ld.param.b64"] = {"dP", [](Context const& c, uint32_t) { c.wide(0).fill(parameter<uint64_t>(c)); }};
    table["cvt.u16.u32"] = unary("hw", [](U a) { return a & 0xFFFF; });
    table["cvt.u32.u16"] = unary("wh", [](U a) { return a; });
    table["cvt.u32.u64"] = {"wd", [](Context const& c, uint32_t) {
                                for (int lane = 0; lane < kLanes; ++lane)
                                {
                                    c.word(0)[lane] = static_cast<U>(c.wide(1)[lane]);
                                }
                            }};
    table["cvt.s64.s32"] = widened([](U a) { return static_cast<uint64_t>(int64_t{asSigned(a)}); });
    table["cvt.u64.u32"] = widened([](U a) { return uint64_t{a}; });
}

} // namespace emulator
