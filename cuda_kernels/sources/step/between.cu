// Small operations between the products of a decoding step, for 1 to 8 rows of float32.
#include "step/block_sum.cuh"
#include "units/xielu.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

// h += norm(x + bias); x becomes 0, for the next product that is added to it. One block per row; weight float32[width], bias the same or
// null.
extern "C" __global__ void __launch_bounds__(THREADS)
add_normed(float* x, const float* bias, const float* weight, float eps, float* h, int width) {
    __shared__ float sums[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    wait_for_inputs();
    start_dependents();
    x += (long long)blockIdx.x * width, h += (long long)blockIdx.x * width;
    float sum = 0.f;
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const float y = __ldcg(x + i) + (bias ? bias[i] : 0.f);
        sum = fmaf(y, y, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += sums[i];
    const float inverse = rsqrtf(sum / (float)width + eps);
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const float y = __ldcg(x + i) + (bias ? bias[i] : 0.f);
        h[i] = __ldcg(h + i) + y * inverse * weight[i];
        x[i] = 0.f;
    }
}

// out = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias (Ba et al., 2016). One block per row; bias float32[width] or null.
extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm(const float* h, const float* weight, const float* bias, float eps, float* out, int width) {
    __shared__ float sums[WARPS];
    wait_for_inputs();
    start_dependents();
    h += (long long)blockIdx.x * width, out += (long long)blockIdx.x * width;
    float sum = 0.f;
    for (int i = threadIdx.x; i < width; i += THREADS) sum += __ldcg(h + i);
    const float mean = block_sum(sum, sums) / (float)width;
    sum = 0.f;
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const float x = __ldcg(h + i) - mean;
        sum = fmaf(x, x, sum);
    }
    const float inverse = rsqrtf(block_sum(sum, sums) / (float)width + eps);
    for (int i = threadIdx.x; i < width; i += THREADS) out[i] = (__ldcg(h + i) - mean) * inverse * weight[i] + (bias ? bias[i] : 0.f);
}

// out = h - mean(h): what an RMS norm makes a LayerNorm of. One block per row.
extern "C" __global__ void __launch_bounds__(THREADS)
center(const float* h, float* out, int width) {
    __shared__ float sums[WARPS];
    wait_for_inputs();
    start_dependents();
    h += (long long)blockIdx.x * width, out += (long long)blockIdx.x * width;
    float sum = 0.f;
    for (int i = threadIdx.x; i < width; i += THREADS) sum += __ldcg(h + i);
    const float mean = block_sum(sum, sums) / (float)width;
    for (int i = threadIdx.x; i < width; i += THREADS) out[i] = __ldcg(h + i) - mean;
}

enum { SILU, GELU, GELU_ERF, RELU_SQUARED, XIELU };

__device__ __forceinline__ float activation(float x, int kind, const Xielu& by) {
    if (kind == XIELU) return xielu(x, by);
    if (kind == GELU) return 0.5f * x * (1.f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    if (kind == GELU_ERF) return 0.5f * x * (1.f + erff(0.7071067811865476f * x));
    if (kind == RELU_SQUARED) return x > 0.f ? x * x : 0.f;
    return __fdiv_rn(x, 1.f + expf(-x));
}

// out = act(x + bias), or with `up` act(x + bias) * (up + up_bias): [rows, cols], n elements; biases float32[cols] or null. out may be x.
// alpha_p to eps: of XIELU.
extern "C" __global__ void __launch_bounds__(THREADS)
activate(const float* x, const float* bias, const float* up, const float* up_bias, float* out, int kind, int cols, int n, float alpha_p,
         float alpha_n, float beta, float eps) {
    wait_for_inputs();
    start_dependents();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    float y = activation(__ldcg(x + i) + (bias ? bias[i % cols] : 0.f), kind, {alpha_p, alpha_n, beta, eps});
    if (up) y *= __ldcg(up + i) + (up_bias ? up_bias[i % cols] : 0.f);
    out[i] = y;
}

// x *= factor, n elements.
extern "C" __global__ void __launch_bounds__(THREADS)
scale(float* x, float factor, int n) {
    wait_for_inputs();
    start_dependents();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) x[i] = __ldcg(x + i) * factor;
}

// x *= sigmoid of the gate of its head: x [rows, heads, length], n elements; gates [rows, heads].
extern "C" __global__ void __launch_bounds__(THREADS)
gate_heads(float* x, const float* gates, int length, int n) {
    wait_for_inputs();
    start_dependents();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) x[i] = __fdiv_rn(__ldcg(x + i), 1.f + expf(-__ldcg(gates + i / length)));
}

// out = norm(first) + norm(second), each with its weights float32[width]; second becomes 0, for the next product that is added to it. One block
// per row.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_normed(const float* first, const float* first_weight, float first_eps, float* second, const float* second_weight, float second_eps,
           float* out, int width) {
    __shared__ float sums[WARPS];
    wait_for_inputs();
    start_dependents();
    const long long at = (long long)blockIdx.x * width;
    first += at, second += at, out += at;
    float squares = 0.f, others = 0.f;
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const float x = __ldcg(first + i), y = __ldcg(second + i);
        squares = fmaf(x, x, squares), others = fmaf(y, y, others);
    }
    const float by = rsqrtf(block_sum(squares, sums) / (float)width + first_eps);
    const float other = rsqrtf(block_sum(others, sums) / (float)width + second_eps);
    for (int i = threadIdx.x; i < width; i += THREADS) {
        out[i] = __ldcg(first + i) * by * first_weight[i] + __ldcg(second + i) * other * second_weight[i];
        second[i] = 0.f;
    }
}

// q_out = norm(q) and k_out = norm(k), each over all heads of a row together: q and k float32[rows, q_width] and [rows, k_width], weights as long
// as rows, eps the same. The results are q_heads and k_heads heads of `size` elements; own[q_heads + k_heads] says which of the row they are,
// all in their order if it is null. Two blocks per row.
extern "C" __global__ void __launch_bounds__(THREADS)
norm_heads(const float* q, const float* k, const float* q_weight, const float* k_weight, float eps, const int* own, float* q_out, float* k_out,
           int q_width, int k_width, int q_heads, int k_heads, int size) {
    __shared__ float sums[WARPS];
    wait_for_inputs();
    start_dependents();
    const bool is_key = blockIdx.y;
    const int width = is_key ? k_width : q_width, heads = is_key ? k_heads : q_heads;
    const float* x = (is_key ? k : q) + (long long)blockIdx.x * width;
    const float* weight = is_key ? k_weight : q_weight;
    float* out = (is_key ? k_out : q_out) + (long long)blockIdx.x * heads * size;
    if (own && is_key) own += q_heads;
    float squares = 0.f;
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const float y = __ldcg(x + i);
        squares = fmaf(y, y, squares);
    }
    const float inverse = rsqrtf(block_sum(squares, sums) / (float)width + eps);
    for (int i = threadIdx.x; i < heads * size; i += THREADS) {
        const int from = own ? own[i / size] * size + i % size : i;
        out[i] = __ldcg(x + from) * inverse * weight[from];
    }
}

// out[layer, row] = (norm(projected[row, layer] * scale) + table_scale * table[row, layer]) / sqrt(2), rows of `length` elements; weights of the
// norm float32[length]. projected and table float32[rows, layers, length], out float32[layers, rows, length]. One block per row and layer.
extern "C" __global__ void __launch_bounds__(THREADS)
layer_inputs(const float* projected, float scale, const float* weight, float eps, const float* table, float table_scale, float* out, int length) {
    __shared__ float sums[WARPS];
    wait_for_inputs();
    start_dependents();
    const int layer = blockIdx.x, row = blockIdx.y;
    const long long at = ((long long)row * gridDim.x + layer) * length;
    projected += at, table += at, out += ((long long)layer * gridDim.y + row) * length;
    float squares = 0.f;
    for (int i = threadIdx.x; i < length; i += THREADS) {
        const float x = __ldcg(projected + i) * scale;
        squares = fmaf(x, x, squares);
    }
    const float by = rsqrtf(block_sum(squares, sums) / (float)length + eps) * scale;
    for (int i = threadIdx.x; i < length; i += THREADS)
        out[i] = (__ldcg(projected + i) * by * weight[i] + table_scale * __ldcg(table + i)) * 0.70710678118654752f;
}

// x = 0, n elements, whatever they are.
extern "C" __global__ void __launch_bounds__(THREADS)
clear(float* x, int n) {
    wait_for_inputs();
    start_dependents();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) x[i] = 0.f;
}

// x = most * tanh(x / most), n elements.
extern "C" __global__ void __launch_bounds__(THREADS)
cap(float* x, float most, int n) {
    wait_for_inputs();
    start_dependents();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) x[i] = most * tanhf(__ldcg(x + i) / most);
}

// hidden *= sigmoid(norm(h) . share): weight float32[width] is that of the norm times the share; hidden [rows, cols] in float32 or bfloat16.
// One block per row.
extern "C" __global__ void __launch_bounds__(THREADS)
take_share(const float* h, const float* weight, float eps, void* hidden, int is_bf16, int width, int cols) {
    __shared__ float sums[WARPS][2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    wait_for_inputs();
    start_dependents();
    h += (long long)blockIdx.x * width;
    float dot = 0.f, squares = 0.f;
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const float x = __ldcg(h + i);
        dot = fmaf(x, weight[i], dot);
        squares = fmaf(x, x, squares);
    }
    dot = warp_sum(dot), squares = warp_sum(squares);
    if (lane == 0) sums[warp][0] = dot, sums[warp][1] = squares;
    __syncthreads();
    dot = squares = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) dot += sums[i][0], squares += sums[i][1];
    const float share = __fdiv_rn(1.f, 1.f + expf(-dot * rsqrtf(squares / (float)width + eps)));
    const long long at = (long long)blockIdx.x * cols;
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        if (is_bf16) {
            u16* x = (u16*)hidden + at + i;
            *x = float_to_bf16(bf16_to_float(__ldcg(x)) * share);
        } else {
            float* x = (float*)hidden + at + i;
            *x = __ldcg(x) * share;
        }
    }
}
