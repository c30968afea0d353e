// Branches, barriers and the end. Lanes go different ways only where the code says that they meet again.
#include "sass_line.h"
#include "sass_values.h"

#include <algorithm>

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
    SassWarp& warp = *context.warp;
    if (lanes != warp.here)
    {
        auto const isAwaited = [&warp](Meeting const& meeting) { return (warp.here & ~meeting.expected) == 0; };
        if (std::none_of(warp.meetings.begin(), warp.meetings.end(), isAwaited))
        {
            fault("a branch that lanes of a warp disagree on");
        }
        warp.others.emplace_back(lanes, instruction.target);
        warp.here &= ~lanes;
        return;
    }
    warp.next = instruction.target;
}

// Go on with lanes that went another way.
void takeOthers(SassWarp& warp)
{
    if (warp.others.empty())
    {
        fault("lanes wait for others that never come");
    }
    std::tie(warp.here, warp.next) = warp.others.back();
    warp.others.pop_back();
}

// BRA target; BRA.U p, target on a uniform predicate; BRA p, target where guard and p hold [PTX bra, bra.uni; kernels]. CALL.REL.NOINC target: compilers use it as a
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
    bool const areTogether = context.warp->here == named[static_cast<size_t>(__builtin_ctz(context.active))];
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
        line.allow({"U"}); // all lanes that are there go the same way: under a guard, or where a predicate says so
        if (line.predicateIsNext())
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

// Lanes will not come to a meeting; those who wait there may be all now.
void stayAway(SassWarp& warp, Meeting& meeting, uint32_t lanes)
{
    meeting.expected &= ~lanes;
    if (meeting.arrived && meeting.arrived == meeting.expected)
    {
        warp.others.emplace_back(meeting.arrived, meeting.next);
        meeting = {};
    }
}

// EXIT: lanes may end one by one [PTX ret]
void exitLanes(Context& context, Instruction const&)
{
    if (!context.warp->products.empty())
    {
        fault("EXIT while a product of the warpgroup is under way");
    }
    SassWarp& warp = *context.warp;
    warp.alive &= ~context.active;
    warp.here &= ~context.active;
    for (Meeting& meeting : warp.meetings)
    {
        stayAway(warp, meeting, context.active);
    }
    warp.done = warp.alive == 0;
    if (!warp.here && !warp.done)
    {
        takeOthers(warp);
    }
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
    instruction.execute = [](Context& context, Instruction const&) {
        if (context.warp->here != context.warp->alive)
        {
            fault("WARPSYNC by some lanes only");
        }
    };
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

// BSSY b, target: the lanes that are here may part ways; BSYNC b: they wait for each other; BREAK b: lanes that will not come
// [PTX bra on what lanes disagree on; kernels]
void letPart(Context& context, Instruction const& instruction)
{
    context.warp->meetings[instruction.immediate] = {context.active, 0, 0};
}

void meet(Context& context, Instruction const& instruction)
{
    SassWarp& warp = *context.warp;
    Meeting& meeting = warp.meetings[instruction.immediate];
    if (context.active != warp.here || (warp.here & ~meeting.expected))
    {
        fault("BSYNC by lanes that BSSY did not name");
    }
    meeting.arrived |= warp.here;
    meeting.next = warp.next;
    if (meeting.arrived == meeting.expected)
    {
        warp.here = meeting.expected;
        meeting = {};
        return;
    }
    takeOthers(warp);
}

void leave(Context& context, Instruction const& instruction)
{
    stayAway(*context.warp, context.warp->meetings[instruction.immediate], context.active);
}

void decodeMeeting(Line& line, Instruction& instruction)
{
    line.allow({"RECONVERGENT", "RELIABLE"});
    std::string const name = line.word();
    if (name.size() < 2 || name[0] != 'B' || (instruction.immediate = static_cast<uint32_t>(std::stoi(name.substr(1)))) >= kMeetings)
    {
        line.refuse("operand " + name);
    }
    if (line.opcode() == "BSSY")
    {
        line.label();
    }
    instruction.execute = line.opcode() == "BSSY" ? letPart : line.opcode() == "BSYNC" ? meet : leave;
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
        {"BSSY", decodeMeeting},
        {"BSYNC", decodeMeeting},
        {"BREAK", decodeMeeting},
        {"BMOV", decodeBmov},
        {"MEMBAR", decodeMembar},
        {"FENCE", decodeFence},
    };
    return table;
}

} // namespace emulator::sass
