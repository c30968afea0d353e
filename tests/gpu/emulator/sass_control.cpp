// Branches, barriers and the end. Lanes never go different ways: what would send them there faults.
#include "sass_line.h"
#include "sass_values.h"

namespace emulator::sass
{
namespace
{

void jump(Context& context, Instruction const& instruction, uint32_t lanes)
{
    if (!lanes)
    {
        return;
    }
    if (lanes != context.warp->alive)
    {
        fault("a branch that lanes of a warp disagree on");
    }
    context.warp->next = instruction.target;
}

// BRA target; BRA.U p, target on a uniform predicate [PTX bra, bra.uni]. CALL.REL.NOINC target: compilers use it as a
// branch; a subroutine's caller has put the address to return to into a register [kernels; BRA.DIV below].
void branch(Context& context, Instruction const& instruction)
{
    jump(context, instruction, context.active & mask(context, instruction.predicate[0]));
}

// BRA.DIV lanes, target: taken where not all of the named lanes are together [PTX shfl.sync behind a loop; it is never
// taken here, where lanes are together until they exit].
void branchIfDivergent(Context& context, Instruction const& instruction)
{
    Lanes scratch;
    Lanes const& named = integer(context, instruction.source[0], scratch);
    bool const areTogether = context.warp->alive == named[static_cast<size_t>(__builtin_ctz(context.active))];
    jump(context, instruction, areTogether ? 0 : context.active);
}

void decodeBra(Line& line, Instruction& instruction)
{
    if (line.has("DIV"))
    {
        instruction.source[0] = line.integer();
        instruction.execute = branchIfDivergent;
    }
    else
    {
        if (line.has("U"))
        {
            instruction.predicate[0] = line.predicate();
        }
        instruction.execute = branch;
    }
    instruction.target = line.label();
}

void decodeCall(Line& line, Instruction& instruction)
{
    line.need("REL");
    line.need("NOINC");
    instruction.target = line.label();
    instruction.execute = branch;
}

// EXIT: lanes may end one by one [PTX ret]
void exitLanes(Context& context, Instruction const&)
{
    if (!context.warp->products.empty())
    {
        fault("EXIT while a product of the warpgroup is under way");
    }
    context.warp->alive &= ~context.active;
    context.warp->done = context.warp->alive == 0;
}

void decodeExit(Line&, Instruction& instruction)
{
    instruction.execute = exitLanes;
}

// BAR.SYNC.DEFER_BLOCKING 0x0 [PTX bar.sync 0]
void decodeBar(Line& line, Instruction& instruction)
{
    line.need("SYNC");
    line.need("DEFER_BLOCKING");
    if (line.immediate() != 0)
    {
        line.refuse("number of the barrier");
    }
    instruction.execute = [](Context& context, Instruction const&) {
        if (context.active != context.warp->alive)
        {
            fault("a barrier that only some lanes of a warp reach");
        }
        context.warp->atBarrier = true;
    };
}

void nothing(Context&, Instruction const&)
{
}

void decodeNop(Line&, Instruction& instruction)
{
    instruction.execute = nothing;
}

// WARPSYNC lanes; WARPSYNC.ALL [PTX bar.warp.sync]: lanes are together already.
// WARPSYNC.COLLECTIVE ... ENDCOLLECTIVE: what lanes do that are not, behind BRA.DIV. It is not known.
void decodeWarpsync(Line& line, Instruction& instruction)
{
    if (line.has("COLLECTIVE"))
    {
        line.integer();
        line.label();
        instruction.execute = [](Context&, Instruction const&) { fault("WARPSYNC.COLLECTIVE is not known"); };
        return;
    }
    if (!line.has("ALL"))
    {
        line.integer();
    }
    instruction.execute = nothing;
}

void decodeEndCollective(Line&, Instruction& instruction)
{
    instruction.execute = [](Context&, Instruction const&) { fault("ENDCOLLECTIVE is not known"); };
}

// RET.REL.NODEC a, base: the end of the subroutines that BRA.DIV leads to, where lanes have left others behind.
void decodeRet(Line& line, Instruction& instruction)
{
    line.need("REL");
    line.need("NODEC");
    line.wide();
    line.label();
    instruction.execute = [](Context&, Instruction const&) { fault("RET is not known"); };
}

// BMOV: registers in which lanes that part are remembered [sm_87 only]; lanes do not part.
void decodeBmov(Line& line, Instruction& instruction)
{
    line.need("32");
    line.allow({"CLEAR"});
    line.word();
    line.word();
    instruction.execute = nothing;
}

// MEMBAR.ALL.CTA, FENCE.VIEW.ASYNC.S [PTX fence.proxy.async]: memory here is in order, but HGMMA faults without the
// fence.
void decodeMembar(Line& line, Instruction& instruction)
{
    line.need("ALL");
    line.need("CTA");
    instruction.execute = nothing;
}

void decodeFence(Line& line, Instruction& instruction)
{
    for (char const* modifier : {"VIEW", "ASYNC", "S"})
    {
        line.need(modifier);
    }
    instruction.execute = [](Context& context, Instruction const&) { context.warp->needsFence = false; };
}

} // namespace

DecodeTable const& controlInstructions()
{
    static DecodeTable const table = {
        {"BRA", decodeBra},
        {"CALL", decodeCall},
        {"RET", decodeRet},
        {"EXIT", decodeExit},
        {"BAR", decodeBar},
        {"NOP", decodeNop},
        {"WARPSYNC", decodeWarpsync},
        {"ENDCOLLECTIVE", decodeEndCollective},
        {"BMOV", decodeBmov},
        {"MEMBAR", decodeMembar},
        {"FENCE", decodeFence},
    };
    return table;
}

} // namespace emulator::sass
