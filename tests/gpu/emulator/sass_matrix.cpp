// Tensor cores of a warp.
#include "sass_line.h"
#include "sass_values.h"

namespace emulator::sass
{
namespace
{

// HMMA.16816.F32[.BF16] d, a, b, c [PTX mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32, .bf16.bf16];
// HMMA.1688.F32.TF32 [PTX mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32]. Fragments lie as for mma.
template <Kind kind>
void multiply(Context& context, Instruction const& instruction)
{
    needAllLanes(context, "HMMA");
    Row* const rows = context.warp->rows.data();
    auto const at = [&](size_t operand, int k) -> Lanes const* {
        return &rows[instruction.source[operand].row + k].lanes;
    };
    Row* const d = rows + instruction.destination;
    mma(kind, {&d[0].lanes, &d[1].lanes, &d[2].lanes, &d[3].lanes}, {at(0, 0), at(0, 1), at(0, 2), at(0, 3)},
        {at(1, 0), at(1, 1)}, {at(2, 0), at(2, 1), at(2, 2), at(2, 3)});
    context.counters.tensorFlops += kind == Kind::kTF32 ? 2 * 16 * 8 * 8 : 2 * 16 * 8 * 16;
}

void decodeHmma(Line& line, Instruction& instruction)
{
    bool const isTf32 = line.has("TF32"), isBf16 = line.has("BF16");
    line.need("F32");
    line.need(isTf32 ? "1688" : "16816");
    line.destination(instruction, 4);
    instruction.source[0] = line.quad(4);
    instruction.source[1] = line.quad(2);
    instruction.source[2] = line.quad(4);
    instruction.execute = isTf32 ? multiply<Kind::kTF32> : isBf16 ? multiply<Kind::kBF16> : multiply<Kind::kHALF>;
}

} // namespace

DecodeTable const& matrixInstructions()
{
    static DecodeTable const table = {{"HMMA", decodeHmma}};
    return table;
}

} // namespace emulator::sass
