// The search of quantize/search/trellis/rows.py (and scales.py) for CUDA devices. Names and steps are the same and
// are explained there.
//
// trellis_prepare: a CUDA block per row finds the row's largest magnitude, its blocks' guesses and d.
// trellis_search:  a warp per block of 32 finds the best multiple and code words; see trellis_words.cu, which is compiled after this file.
// trellis_finish:  a CUDA block per row fits d and packs bytes.
//
// The first and last kernels add in the order of the CPU's search and get its numbers. Compile with
// -fmad=false: the search itself uses fmaf where a multiplication and an addition may be fused. No
// result depends on how warps are scheduled.
//
// Given by -D: DIM values per group, GROUPS per block, BOOKS, SIDES (signs of multiples), TRIALS, BATCH of them searched at once,
// NODES, MAGNITUDES, INTEGERS, SPREAD, SIZE, GAIN, SMALLEST, MARGIN, TARGETS, POSITIVE, NEGATIVE (counts), FORMAT (1 to 4).

constexpr int FAN = 16, LEAF = 32, ROUNDS = NODES / 32, THREADS = 256;
constexpr unsigned ALL = 0xffffffffu;
#define INFINITE __int_as_float(0x7f800000)

static_assert(GROUPS * BATCH <= 32 && NODES % 32 == 0 && (NODES & (NODES - 1)) == 0);

__device__ float misfit(float ratio) {
    float square = ratio + 1.0f / ratio - 2.0f;
    return ratio < 1.0f ? square + square : square;
}

// constants: TARGETS targets, POSITIVE multiples, NEGATIVE multiples.
__device__ float closeness(const float* constants, float guess) {
    const float* multiples = constants + TARGETS;
    if (INTEGERS) return misfit(fmaxf(fminf(floorf(guess + 0.5f), multiples[POSITIVE - 1]), 1.0f) / guess);
    float lowest = INFINITE;
    for (int k = 0; k < POSITIVE + NEGATIVE; ++k) lowest = fminf(lowest, misfit(multiples[k] / guess));
    return lowest;
}

// A block's guessed scale and its energy.
struct Guess {
    float scale, energy;
};

extern "C" __global__ void __launch_bounds__(THREADS)
trellis_prepare(const float* x, const float* w, const float* constants, float* rows, Guess* guesses, int blocks) {
    x += (long long)blockIdx.x * blocks * 32;
    guesses += (long long)blockIdx.x * blocks;
    __shared__ float part[THREADS / 32], share[TARGETS][64], totals[TARGETS];
    const int thread = threadIdx.x;

    float top = 0;
    for (int i = thread; i < blocks * 32; i += THREADS) top = fmaxf(top, fabsf(x[i]));
    for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
    if (thread % 32 == 0) part[thread / 32] = top;
    __syncthreads();
    top = 0;
    for (int i = 0; i < THREADS / 32; ++i) top = fmaxf(top, part[i]);
    __syncthreads();

    float largest = 0;
    for (int b = thread; b < blocks; b += THREADS) {
        float energy = 0, total = 0, weight = 0;
        for (int i = 32 * b; i < 32 * b + 32; ++i) {
            const float value = top > 0 ? x[i] / top : 0.0f, root = __fsqrt_rn(w[i]), square = value * value;
            energy += (w[i] * value) * value;
            total += (root * square) * square;
            weight += root;
        }
        float guess = fmaxf(SIZE * __fsqrt_rn(__fsqrt_rn(total / weight)), SMALLEST);
        guesses[b] = {guess, energy};
        if (energy > 0) largest = fmaxf(largest, guess);
    }
    for (int step = 16; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, step));
    if (thread % 32 == 0) part[thread / 32] = largest;
    if (thread < TARGETS) totals[thread] = 0;
    __syncthreads();
    largest = 0;
    for (int i = 0; i < THREADS / 32; ++i) largest = fmaxf(largest, part[i]);

    for (int start = 0; start < blocks; start += 64) {
        const int count = min(64, blocks - start);
        for (int i = thread; i < TARGETS * count; i += THREADS) {
            const int target = i / count, b = i % count;
            const Guess guess = guesses[start + b];
            share[target][b] = closeness(constants, guess.scale / (largest / constants[target])) * guess.energy;
        }
        __syncthreads();
        if (thread < TARGETS)
            for (int b = 0; b < count; ++b) totals[thread] += share[thread][b];
        __syncthreads();
    }
    if (thread == 0) {
        float least = INFINITE, d = 0;
        for (int target = 0; target < TARGETS; ++target)
            if (totals[target] < least) {
                least = totals[target];
                d = largest / constants[target];
            }
        rows[2 * blockIdx.x] = top;
        rows[2 * blockIdx.x + 1] = d;
    }
}

// The generator's next state and its value.
__device__ float next_value(unsigned& state) {
    state *= 3417055213u;
    float v = (float)((int)__dp4a(state & 0x3f3f3f3fu, 0x01010101u, 0u) - 126);
    return MAGNITUDES ? fabsf(v) : v;
}

__device__ unsigned char table_code(int multiple) {
    const signed char table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    unsigned char code = 0;
    for (int k = 0; k < 16; ++k) code = table[k] == multiple ? k : code;
    return code;
}

// Eight blocks of 32 into the cleared bytes of one block of 256. Byte maps: formats/codecs/trellis.py.
__device__ void pack(const float* x, const int* chosen, unsigned char* out) {
    for (int b = 0; b < 8; ++b, chosen += GROUPS + 2) {
        const int multiple = chosen[GROUPS];
        if (FORMAT == 1) out[b] = table_code(multiple);
        if (FORMAT == 2) out[b & 3] |= table_code(multiple) << (4 * (b >> 2));
        if (FORMAT == 3) {
            out[b & 3] |= multiple << (4 * (b >> 2));
            for (int l = 0; l < 32; ++l) out[68 + l] |= (x[32 * b + l] < 0) << b;
        }
        unsigned high = 0;
        for (int g = 0; g < GROUPS; ++g) {
            const int index = chosen[g], m = b * GROUPS + g;
            if (FORMAT == 1) {
                out[b] |= index >> 12 << (4 + g);
                out[8 + m] = index & 255;
                out[40 + (m & 15)] |= (index >> 8 & 15) << (4 * (m >> 4));
            } else if (FORMAT == 4) {
                high |= (unsigned)(index >> 12) << (3 * g);
                out[32 + m] = index & 255;
                out[96 + (m & 31)] |= (index >> 8 & 15) << (4 * (m >> 5));
            } else {
                out[4 + 2 * m] = index & 255;
                out[5 + 2 * m] = index >> 8;
            }
        }
        if (FORMAT == 4) {
            out[4 * b] = (multiple + 64) << 1 | chosen[GROUPS + 1];
            for (int i = 0; i < 3; ++i) out[4 * b + 1 + i] = high >> (8 * i) & 255;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
trellis_finish(const float* x, const float* w, const float* rows, const int* chosen, float* heads, unsigned char* bodies,
               int blocks) {
    const long long row = blockIdx.x;
    x += row * blocks * 32;
    chosen += row * blocks * (GROUPS + 2);
    bodies += row * (blocks / 8) * BLOCK_BYTES;
    __shared__ float2 share[THREADS];
    const float top = rows[2 * row];
    float sxv = 0, svv = 0;
    for (int start = 0; start < blocks; start += THREADS) {
        const int b = start + threadIdx.x;
        if (b < blocks && top > 0) {
            const int* mine = chosen + b * (GROUPS + 2);
            float a = 0, c = 0;
            for (int g = 0; g < GROUPS; ++g) {
                unsigned state = 4096u + 32768u * mine[GROUPS + 1] + mine[g];
                for (int i = 32 * b + DIM * g; i < 32 * b + DIM * g + DIM; ++i) {
                    const float v = next_value(state), value = MAGNITUDES ? fabsf(x[i]) / top : x[i] / top;
                    a += (w[i] * value) * v;
                    c += (w[i] * v) * v;
                }
            }
            const float k = mine[GROUPS];
            share[threadIdx.x] = make_float2(k * a, (k * k) * c);
        }
        __syncthreads();
        if (threadIdx.x == 0 && top > 0)
            for (int i = 0; i < min(THREADS, blocks - start); ++i) {
                sxv += share[i].x;
                svv += share[i].y;
            }
        __syncthreads();
    }
    if (threadIdx.x == 0) heads[row] = top > 0 && svv > 0 ? ((sxv / svv) * GAIN) * top : 0.0f;
    for (int block = threadIdx.x; block < blocks / 8; block += THREADS) {
        unsigned char packed[BLOCK_BYTES] = {};
        pack(x + block * 256, chosen + block * 8 * (GROUPS + 2), packed);
        for (int i = 0; i < BLOCK_BYTES / 4; ++i) ((unsigned*)(bodies + block * BLOCK_BYTES))[i] = ((const unsigned*)packed)[i];
    }
}
