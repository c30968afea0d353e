// Tensor cores of a warpgroup, sm_90: four warps multiply 64 rows, with operands in shared memory.
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": the matrix descriptor, the canonical layouts of
// K-major and MN-major operands, and the fragments of wgmma.mma_async.
#include "sass_line.h"
#include "sass_values.h"

#include <cstring>

namespace emulator::sass
{
namespace
{

constexpr int kRows = 16; // of the 64, for each warp
constexpr int kMostColumns = 256;
constexpr int kStepWords = 8; // along K: 16 numbers of 16 bits, or 8 of 32
constexpr uint32_t kChunk = 16; // bytes that lie together in every layout

// PTX ISA, "Matrix-descriptor Format": addresses in units of 16 bytes.
Descriptor readDescriptor(Context const& context, int row)
{
    static constexpr uint32_t kWidths[] = {16, 128, 64, 32}; // by the swizzling mode
    uint64_t const bits = wide(context, {static_cast<uint16_t>(row), Change::kNONE})[0];
    if (bits >> 49 & 7)
    {
        fault("HGMMA: base offset in a descriptor");
    }
    auto const field = [&](int first) { return static_cast<uint32_t>(bits >> first & 0x3FFF) * kChunk; };
    return {field(0), field(16), field(32), kWidths[bits >> 62]};
}

// The 16 bytes at an offset from the start. Swizzling exchanges the chunks of an atom's row by the row's number, which
// is found in the address bits above the 128 bytes.
void readChunk(Context const& context, Descriptor const& matrix, uint32_t offset, void* to)
{
    uint32_t address = matrix.start + offset;
    uint32_t const chunks = matrix.width / kChunk;
    address ^= (address >> 7 & (chunks - 1)) * kChunk;
    std::memcpy(to, context.shared.read(address, kChunk, context.warp->id, "HGMMA"), kChunk);
}

// One row along K, 32 bytes, of a matrix whose rows count M or N.
void readKMajor(Context const& context, Descriptor const& matrix, uint32_t row, uint32_t* words)
{
    for (uint32_t chunk = 0; chunk < 2; ++chunk)
    {
        uint32_t const along = matrix.width == kChunk ? chunk * matrix.leading : chunk * kChunk;
        readChunk(context, matrix, row / 8 * matrix.stride + row % 8 * matrix.width + along, words + chunk * 4);
    }
}

// All of B where its rows run along N: the words of its columns, two numbers of 16 bits along K in each.
void readTransposed(Context const& context, Descriptor const& matrix, int columns, uint32_t (*words)[kStepWords])
{
    if (matrix.width == kChunk)
    {
        fault("HGMMA: transposed without swizzling");
    }
    for (uint32_t k = 0; k < 2 * kStepWords; ++k)
    {
        for (uint32_t first = 0; first < static_cast<uint32_t>(columns); first += 8)
        {
            uint16_t numbers[8];
            uint32_t const along = first * 2; // bytes
            uint32_t const offset = along / matrix.width * matrix.leading + along % matrix.width;
            readChunk(context, matrix, offset + k / 8 * matrix.stride + k % 8 * matrix.width, numbers);
            for (uint32_t n = 0; n < 8; ++n)
            {
                reinterpret_cast<uint16_t*>(words[first + n])[k] = numbers[n];
            }
        }
    }
}

// What the instruction's immediate says.
struct Form
{
    Kind kind = Kind::kHALF;
    int columns = 0;
    bool isLeftInMemory = false;
    bool isTransposed = false;
    bool endsGroup = false;
};

uint32_t packed(Form const& form)
{
    uint32_t const flags
        = uint32_t{form.endsGroup} << 2 | uint32_t{form.isLeftInMemory} << 1 | uint32_t{form.isTransposed};
    return static_cast<uint32_t>(form.kind) << 16 | static_cast<uint32_t>(form.columns) << 4 | flags;
}

Form unpacked(uint32_t bits)
{
    auto const columns = static_cast<int>(bits >> 4 & 0xFFF);
    return {static_cast<Kind>(bits >> 16), columns, (bits & 2) != 0, (bits & 1) != 0, (bits & 4) != 0};
}

// Registers of A, as for mma.m16n8k16: rows lane / 4 and 8 further; words lane % 4 and 4 further.
std::array<Lanes, 4> leftFromMemory(Context const& context, Descriptor const& matrix)
{
    uint32_t words[kRows][kStepWords];
    for (uint32_t row = 0; row < kRows; ++row)
    {
        readKMajor(context, matrix, static_cast<uint32_t>(context.warp->id % 4 * kRows) + row, words[row]);
    }
    std::array<Lanes, 4> left;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        for (int k = 0; k < 4; ++k)
        {
            left[k][lane] = words[lane / 4 + k % 2 * 8][lane % 4 + k / 2 * 4];
        }
    }
    return left;
}

// Each warp does its 16 rows.
void multiply(Context& context, Product const& product)
{
    Instruction const& instruction = *product.instruction;
    Form const form = unpacked(instruction.immediate);
    Row* const rows = context.warp->rows.data();
    std::array<Lanes, 4> left;
    for (int k = 0; k < 4; ++k)
    {
        left[k] = rows[instruction.source[0].row + k].lanes;
    }
    if (form.isLeftInMemory)
    {
        left = leftFromMemory(context, product.left);
    }
    uint32_t words[kMostColumns][kStepWords];
    if (form.isTransposed)
    {
        readTransposed(context, product.right, form.columns, words);
    }
    for (int n = 0; n < form.columns && !form.isTransposed; ++n)
    {
        readKMajor(context, product.right, static_cast<uint32_t>(n), words[n]);
    }
    bool const isFromZero = instruction.source[1].row == kZeroRows;
    for (int tile = 0; tile < form.columns / 8; ++tile)
    {
        std::array<Lanes, 2> right;
        for (int lane = 0; lane < kLanes; ++lane)
        {
            right[0][lane] = words[tile * 8 + lane / 4][lane % 4];
            right[1][lane] = words[tile * 8 + lane / 4][lane % 4 + 4];
        }
        Row* const d = rows + instruction.destination + tile * 4;
        Row const* const c = rows + (isFromZero ? kZeroRows : instruction.source[1].row + tile * 4);
        mma(form.kind, {&d[0].lanes, &d[1].lanes, &d[2].lanes, &d[3].lanes}, {&left[0], &left[1], &left[2], &left[3]},
            {&right[0], &right[1]}, {&c[0].lanes, &c[1].lanes, &c[2].lanes, &c[3].lanes});
    }
    int const depth = form.kind == Kind::kTF32 ? 8 : 16;
    context.counters.tensorFlops += static_cast<uint64_t>(2 * kRows * form.columns * depth);
}

// HGMMA.64xNxK.F32[.BF16|.TF32] d, gdesc[u], c: A and B described in u:u+1 and u+2:u+3; or d, a, gdesc[u], c: A in
// registers, B in u+2:u+3. c RZ with !UPT: without a sum to add to. gsb0: the last of a group. [PTX
// wgmma.mma_async.sync.aligned.m64nNk16 etc., wgmma.commit_group] Nobody may touch memory and registers meanwhile:
// whoever does is noticed, because the product is formed either at once (ADTP_EMULATOR_EARLY) or when it is waited for.
void issue(Context& context, Instruction const& instruction)
{
    needAllLanes(context, "HGMMA");
    if (context.warp->needsFence) // PTX ISA, "Async proxy"
    {
        fault("HGMMA: shared memory was written since the last fence.proxy.async");
    }
    int const descriptors = instruction.address.uniformRow;
    bool const isLeftInMemory = unpacked(instruction.immediate).isLeftInMemory;
    Product const product{&instruction, isLeftInMemory ? readDescriptor(context, descriptors) : Descriptor{},
        readDescriptor(context, descriptors + 2)};
    context.warp->products.push_back(product);
    if (options().earlyCopies)
    {
        multiply(context, product);
    }
}

// WARPGROUP.DEPBAR.LE gsb0, n: at most n groups are under way [PTX wgmma.wait_group n]
void await(Context& context, Instruction const& instruction)
{
    std::vector<Product>& products = context.warp->products;
    size_t groups = 0;
    for (Product const& product : products)
    {
        groups += unpacked(product.instruction->immediate).endsGroup;
    }
    while (groups > instruction.immediate)
    {
        if (!options().earlyCopies)
        {
            multiply(context, products.front());
        }
        groups -= unpacked(products.front().instruction->immediate).endsGroup;
        products.erase(products.begin());
    }
}

void decodeHgmma(Line& line, Instruction& instruction)
{
    Form form;
    form.kind = line.has("TF32") ? Kind::kTF32 : line.has("BF16") ? Kind::kBF16 : Kind::kHALF;
    line.need("F32");
    std::string const shape = line.nextModifier(), depth = form.kind == Kind::kTF32 ? "x8" : "x16";
    form.columns = shape.compare(0, 3, "64x") == 0 ? std::atoi(shape.c_str() + 3) : 0;
    bool const isWhole = form.columns % 8 == 0 && form.columns >= 8 && form.columns <= kMostColumns;
    if (!isWhole || shape != "64x" + std::to_string(form.columns) + depth)
    {
        line.refuse("shape " + shape);
    }
    line.block(instruction, form.columns / 2);
    form.isLeftInMemory = line.isNext("gdesc");
    if (!form.isLeftInMemory)
    {
        instruction.source[0] = line.quad(4);
    }
    instruction.address.uniformRow = line.descriptors(form.isTransposed);
    instruction.source[1] = line.blockSource(form.columns / 2);
    bool const addsNothing = line.isNext("!UPT");
    if (addsNothing)
    {
        line.predicate();
    }
    if (addsNothing != (instruction.source[1].row == kZeroRows) || (form.isTransposed && form.kind == Kind::kTF32))
    {
        line.refuse("form");
    }
    form.endsGroup = line.isNext("gsb0");
    if (form.endsGroup)
    {
        line.word();
    }
    instruction.immediate = packed(form);
    instruction.execute = issue;
}

// WARPGROUP.ARRIVE [PTX wgmma.fence]: registers here are in order.
void decodeWarpgroup(Line& line, Instruction& instruction)
{
    if (line.has("ARRIVE"))
    {
        instruction.execute = [](Context&, Instruction const&) {};
        return;
    }
    line.need("DEPBAR");
    line.need("LE");
    if (line.word() != "gsb0")
    {
        line.refuse("scoreboard");
    }
    instruction.immediate = line.immediate();
    instruction.execute = await;
}

} // namespace

DecodeTable const& warpgroupInstructions()
{
    static DecodeTable const table = {{"HGMMA", decodeHgmma}, {"WARPGROUP", decodeWarpgroup}};
    return table;
}

} // namespace emulator::sass
