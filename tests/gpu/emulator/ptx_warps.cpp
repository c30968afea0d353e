// What the lanes of a warp, or the warps of a block, do together: shuffles, sums, matrices, barriers, branches.
#include "ptx.h"

#include <numeric>

namespace emulator
{
namespace
{

// "Data Movement and Conversion Instructions: shfl.sync" with the whole warp as a segment and all lanes: out of lane `source(lane, b)`.
template <typename F>
Operation shuffle(F source, uint32_t clamp = 31)
{
    return {"wwwww", [source, clamp](Context const& c, uint32_t) {
                if (c.same(3) != clamp || c.same(4) != kAllLanes)
                {
                    fault("shfl.sync: only with all 32 lanes");
                }
                Lanes const from = c.word(1);
                Lanes const by = c.word(2);
                for (int lane = 0; lane < kLanes; ++lane)
                {
                    c.word(0)[lane] = from[source(static_cast<uint32_t>(lane), by[lane]) & 31];
                }
            }};
}

// "Parallel Synchronization and Communication Instructions: redux.sync"
template <typename F>
Operation reduced(F f)
{
    return {"www", [f](Context const& c, uint32_t) {
                if (c.same(2) != kAllLanes)
                {
                    fault("redux.sync: only with all 32 lanes");
                }
                Lanes const& values = c.word(1);
                c.word(0).fill(std::accumulate(values.begin() + 1, values.end(), values[0], f));
            }};
}

// "Warp Level Matrix Multiply-Accumulate Instructions: mma". Operands: D 4, A 4, B 2, C 4 registers.
Operation tensor(Kind kind)
{
    return {std::string(14, 'w'), [kind](Context const& c, uint32_t) {
                mma(kind, {&c.word(0), &c.word(1), &c.word(2), &c.word(3)},
                    {&c.word(4), &c.word(5), &c.word(6), &c.word(7)}, {&c.word(8), &c.word(9)},
                    {&c.word(10), &c.word(11), &c.word(12), &c.word(13)});
                c.counters.tensorFlops += 2 * 16 * 8 * (kind == Kind::kTF32 ? 8 : 16);
            }};
}

// "Warp-level matrix load instruction: ldmatrix", .x4
Operation matrices(bool transposed)
{
    return {"wwwwS", [transposed](Context const& c, uint32_t) {
                Lanes const addresses = c.word(4);
                auto const offset = static_cast<uint32_t>(c.operand(4).offset);
                c.counters.shared(addresses, kAllLanes, 16);
                loadMatrices(c.shared, c.warp.id, addresses, offset, 4, transposed,
                    {&c.word(0), &c.word(1), &c.word(2), &c.word(3)});
            }};
}

Operation oneMatrix()
{
    return {"wS", [](Context const& c, uint32_t) {
                Lanes const addresses = c.word(1);
                auto const offset = static_cast<uint32_t>(c.operand(1).offset);
                c.counters.shared(addresses, 0xFF, 16); // of 8 rows
                loadMatrices(c.shared, c.warp.id, addresses, offset, 1, false, {&c.word(0)});
            }};
}

// "Parallel Synchronization and Communication Instructions: bar"
void blockBarrier(Context const& c, uint32_t)
{
    if (c.same(0) != 0)
    {
        fault("bar.sync: only barrier 0");
    }
    c.warp.atBarrier = true;
}

// Lanes run in step here, so that a warp is together anyway: whether this is missing cannot be seen.
void warpBarrier(Context const& c, uint32_t)
{
    if (c.same(0) != kAllLanes)
    {
        fault("bar.warp.sync: only with all 32 lanes");
    }
}

// "Control Flow Instructions: bra". Lanes that part ways would need what is not here.
void branch(Context const& c, uint32_t mask)
{
    if (mask != 0 && mask != kAllLanes)
    {
        fault("divergent branch");
    }
    if (mask)
    {
        c.warp.next = c.instruction.target;
    }
}

} // namespace

uint32_t Context::same(size_t n) const
{
    Lanes const& lanes = word(n);
    for (uint32_t value : lanes)
    {
        if (value != lanes[0])
        {
            fault("an operand differs between lanes that must have one value");
        }
    }
    return lanes[0];
}

void addWarps(Operations& table)
{
    table["shfl.sync.bfly.b32"] = shuffle([](uint32_t lane, uint32_t by) { return lane ^ by; });
    table["shfl.sync.idx.b32"] = shuffle([](uint32_t, uint32_t by) { return by; });
    table["shfl.sync.up.b32"] = shuffle([](uint32_t lane, uint32_t by) { return by > lane ? lane : lane - by; }, 0);
    table["redux.sync.add.s32"] = reduced([](uint32_t a, uint32_t b) { return a + b; });
    table["redux.sync.min.s32"] = reduced([](uint32_t a, uint32_t b) { return asSigned(a) < asSigned(b) ? a : b; });
    table["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"] = tensor(Kind::kHALF);
    table["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"] = tensor(Kind::kBF16);
    table["mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"] = tensor(Kind::kTF32);
    table["ldmatrix.sync.aligned.m8n8.x1.shared.b16"] = oneMatrix();
    table["ldmatrix.sync.aligned.m8n8.x4.shared.b16"] = matrices(false);
    table["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"] = matrices(true);
    table["bar.sync"] = {"w", blockBarrier};
    table["bar.warp.sync"] = {"w", warpBarrier};
    table["bra"] = {"L", branch, true};
    table["bra.uni"] = {"L", branch};
    table["ret"] = {"", [](Context const& c, uint32_t) { c.warp.done = true; }};
}

} // namespace emulator
