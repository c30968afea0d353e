// The products in lower precision as ONNX Runtime's custom operators.
#pragma once

#include "linear_pieces.h"
#include "tensors.h"

namespace adtp
{

// Add AdtpBf16Linear, AdtpInt8Linear, and both with a GELU behind them, or with results for queries, keys and values.
ort::Status* addLinearOperators(ort::Api const& api, ort::Domain* domain);

// Add those with a sum and norm behind one product, or behind the two of a feed-forward network.
ort::Status* addChainOperators(ort::Api const& api, ort::Domain* domain);

// The fastest level here. It is looked for once: in a virtual machine, CPUID takes as long as a small product.
inline LinearLevel const& bestLevel()
{
    static LinearLevel const& best = *linearLevel(nullptr);
    return best;
}

namespace
{

// Inputs of a product behind x: weight and bias, or factors, weight, scale, sums and bias.
template <bool Int8>
constexpr size_t kOfProduct = Int8 ? 5 : 2;

// Their types.
template <bool Int8>
ort::Element typeOfProduct(size_t i)
{
    if (Int8)
    {
        return i == 1 ? ort::kInt8 : i == 3 ? ort::kInt32 : ort::kFloat;
    }
    return i == 0 ? ort::kBfloat16 : ort::kFloat;
}

// Say what is wrong with the number of values that a sum has; null for nothing. Of bytes, more could leave 32 bits.
template <bool Int8>
char const* wrongSize(int64_t terms)
{
    constexpr int64_t most = INT32_MAX / (255 * 128);
    return terms < 1 ? "in_features and inner_features must be at least 1"
        : Int8 && terms > most ? "in_features and inner_features must be at most 65793"
                               : nullptr;
}

// Take them; false where they do not fit one another. A single factor is 1: nothing is multiplied then.
template <bool Int8>
bool readProduct(Input const* in, int64_t k, Linear& call)
{
    constexpr int64_t values = Int8 ? 4 : 2;
    Input const &factors = in[0], &weight = in[Int8 ? 1 : 0], &scale = in[Int8 ? 2 : 0], &sums = in[Int8 ? 3 : 0];
    Input const& bias = in[kOfProduct<Int8> - 1];
    call.factors = Int8 && factors.is({k}) ? static_cast<float const*>(factors.data) : nullptr;
    call.weight = weight.data;
    call.scale = Int8 ? static_cast<float const*>(scale.data) : nullptr;
    call.sums = Int8 ? static_cast<int32_t const*>(sums.data) : nullptr;
    call.bias = static_cast<float const*>(bias.data);
    call.k = k;
    call.n = bias.shape[0];
    return bias.is({call.n}) && weight.is({divideUp(call.n, kColumns), divideUp(k, values), kColumns, values})
        && (!Int8 || (scale.is({call.n}) && sums.is({call.n})))
        && (!Int8 || call.factors || (factors.is({1}) && *static_cast<float const*>(factors.data) == 1.0F));
}

// Pieces on ONNX Runtime's threads, where there are several of them. status: where what it says is left.
inline auto onThreads(ort::Api const& api, ort::KernelContext const* context, ort::Status*& status)
{
    return [&api, context, &status](int64_t count, Piece piece) {
        auto const one = [](void* work, size_t i) { (*static_cast<Piece const*>(work))(static_cast<int64_t>(i)); };
        if (count > 1)
        {
            status = api.call<ort::ParallelFor>(context, static_cast<void (*)(void*, size_t)>(one), static_cast<size_t>(count),
                size_t{0}, static_cast<void*>(&piece));
        }
        else if (count == 1)
        {
            piece(0);
        }
        return status == nullptr;
    };
}

// What all of these operators answer with: results in fp32, one unless they say otherwise; and how a kernel ends.
template <typename Kernel>
void setLinear(ort::Operator& made)
{
    setCommon(made);
    made.getOutputType = [](ort::Operator const*, size_t) { return ort::kFloat; };
    made.getOutputCount = [](ort::Operator const*) -> size_t { return 1; };
    made.destroyKernel = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
}

} // namespace
} // namespace adtp
