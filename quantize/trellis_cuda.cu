// The search of quantize/search/trellis.py for CUDA devices. Names and steps are the same; see there for what they mean.
//
// trellis_prepare: a CUDA block per row finds the row's largest magnitude, its blocks' guesses and d.
// trellis_search:  a warp per block of 32 finds the best multiple and code words.
// trellis_finish:  a CUDA block per row fits d and packs bytes.
//
// The first and last add in the order of the CPU's search and get its numbers. Compile with -fmad=false: where a multiplication
// and an addition may be joined, in the search proper, fmaf says so. Every result is independent of how warps are scheduled.
//
// Given by -D: DIM values per group, GROUPS per block, BOOKS, SIDES (signs of multiples), TRIALS, BATCH of them searched at once,
// NODES, MAGNITUDES, INTEGERS, SPREAD, SIZE, GAIN, SMALLEST, MARGIN, TARGETS, POSITIVE, NEGATIVE (counts), FORMAT (1 to 4).

constexpr int FAN = 16, LEAF = 32, ROUNDS = NODES / 32, THREADS = 256;
constexpr unsigned ALL = 0xffffffffu;
#define INFINITE __int_as_float(0x7f800000)

static_assert(GROUPS * BATCH <= 32 && NODES % 32 == 0);

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
    __shared__ float part[THREADS / 32], share[TARGETS][64], totals[TARGETS], bounds[2];
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

// Word `index` of a book: the generator's next state, and the value of a state.
__device__ float next_value(unsigned& state) {
    state *= 3417055213u;
    float v = (float)((int)__dp4a(state & 0x3f3f3f3fu, 0x01010101u, 0u) - 126);
    return MAGNITUDES ? fabsf(v) : v;
}

// Values of a stored word: pairs of bfloat16, which hold integers up to 256.
#if DIM == 8
typedef uint4 Word;
__device__ void values_of(const Word& word, float* v) {
    const unsigned pairs[4] = {word.x, word.y, word.z, word.w};
#else
typedef uint2 Word;
__device__ void values_of(const Word& word, float* v) {
    const unsigned pairs[2] = {word.x, word.y};
#endif
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) {
        v[2 * i] = __uint_as_float(pairs[i] << 16);
        v[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
}

__device__ unsigned ordered(float value) {  // unsigned integers in the order of floats
    const unsigned bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ float least_of_warp(float value) {
    const unsigned least = __reduce_min_sync(ALL, ordered(value));
    return __uint_as_float(least & 0x80000000u ? least ^ 0x80000000u : ~least);
}

// What a warp knows while it searches the words for one group and BATCH scales; the same in all lanes but for `mine` and `index`.
struct Search {
    float w[DIM], wx[DIM];  // weights, and weights * x (for one scale: -2 / s times that)
    float low[DIM], high[DIM];  // the interval of x / s for all scales
    float ratio[BATCH], energy[BATCH], allowed[BATCH], best[BATCH], mine[BATCH];
    int index[BATCH];  // of the word with the score `mine`
    float limit;

    __device__ void update_limit() {
        limit = 0;
#pragma unroll
        for (int j = 0; j < BATCH; ++j) limit = fmaxf(limit, fminf(allowed[j], energy[j] + best[j] + MARGIN * energy[j]));
    }

    // sum w (distance from the interval to a box)^2; coordinates of boxes are `stride` apart
    __device__ float distance(const float* lowest, const float* highest, int stride) const {
        float total = 0;
#pragma unroll
        for (int i = 0; i < DIM; ++i) {
            const float gap = fmaxf(fmaxf(lowest[i * stride] - (BATCH > 1 ? high[i] : low[i]), low[i] - highest[i * stride]), 0.0f);
            total = __fmaf_rn(w[i] * gap, gap, total);
        }
        return total;
    }

    // What score() needs of a word: its score if there is one scale, else sum w x v and sum w v^2.
    __device__ float2 sums(const float* v) const {
        float a = 0, b = 0;
#pragma unroll
        for (int i = 0; i < DIM; ++i)
            if (BATCH == 1) {
                b = __fmaf_rn(v[i], __fmaf_rn(w[i], v[i], wx[i]), b);
            } else {
                a = __fmaf_rn(wx[i], v[i], a);
                b = __fmaf_rn(w[i] * v[i], v[i], b);
            }
        return make_float2(a, b);
    }

    __device__ float score(float2 sums, int j) const { return BATCH == 1 ? sums.y : __fmaf_rn(-ratio[j], sums.x, sums.y); }

    // Two leaves at a time: what a lane does for one goes on while the other is being loaded.
    __device__ void judge(const Word* words, const unsigned short* indices, int first, int second) {
        float v[DIM];
        const Word one = words[first], two = words[second];
        values_of(one, v);
        const float2 left = sums(v);
        values_of(two, v);
        const float2 right = sums(v);
        bool better = false;
#pragma unroll
        for (int j = 0; j < BATCH; ++j) better |= fminf(score(left, j), score(right, j)) < best[j];
        if (!__any_sync(ALL, better)) return;
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const float least = fminf(score(left, j), score(right, j));
            if (least < best[j]) {
                mine[j] = least;
                index[j] = indices[score(left, j) == least ? first : second];
            }
            best[j] = least_of_warp(mine[j]);
        }
        update_limit();
    }

    // Lanes hold leaves and their distances; the leaves nearer than the limit are judged in the order of the lanes.
    __device__ void judge_leaves(const Word* words, const unsigned short* indices, int leaf, float distance) {
        const int lane = threadIdx.x % 32;
        while (unsigned near = __ballot_sync(ALL, distance < limit)) {
            const int one = __ffs(near) - 1;
            near &= near - 1;
            const int two = near ? __ffs(near) - 1 : one;
            if (lane == one || lane == two) distance = INFINITE;
            judge(words, indices, __shfl_sync(ALL, leaf, one) * LEAF + lane, __shfl_sync(ALL, leaf, two) * LEAF + lane);
        }
    }

    __device__ void search(const Word* words, const unsigned short* indices, const float* leaf_boxes, const float* node_boxes, bool begun) {
        const int lane = threadIdx.x % 32, child = lane % FAN;
        float away[ROUNDS];
#pragma unroll
        for (int q = 0; q < ROUNDS; ++q) {
            const float* box = node_boxes + q * 32 + lane;
            away[q] = distance(box, box + DIM * NODES, NODES);
        }
        if (!begun) {  // the nearest node first, its nearest leaf before the others
            unsigned key = 0xffffffffu;
#pragma unroll
            for (int q = 0; q < ROUNDS; ++q) key = min(key, (__float_as_uint(away[q]) & ~(NODES - 1u)) | (q * 32 + lane));
            const int node = __reduce_min_sync(ALL, key) & (NODES - 1);
#pragma unroll
            for (int q = 0; q < ROUNDS; ++q)
                if (q * 32 + lane == node) away[q] = INFINITE;
            const float* box = leaf_boxes + node * (2 * DIM * FAN) + child;
            float near = lane < FAN ? distance(box, box + DIM * FAN, FAN) : INFINITE;
            const int first = __reduce_min_sync(ALL, (__float_as_uint(near) & ~31u) | lane) & 31;
            if (lane == first) near = INFINITE;
            judge(words, indices, (node * FAN + first) * LEAF + lane, (node * FAN + first) * LEAF + lane);
            judge_leaves(words, indices, node * FAN + child, near);
        }
#pragma unroll
        for (int q = 0; q < ROUNDS; ++q)
            while (unsigned near = __ballot_sync(ALL, away[q] < limit)) {  // two nodes at a time, one for either half of the warp
                const int one = __ffs(near) - 1;
                near &= near - 1;
                const int two = near ? __ffs(near) - 1 : one;
                if (lane == one || lane == two) away[q] = INFINITE;
                const int node = q * 32 + (lane < FAN ? one : two);
                const float* box = leaf_boxes + node * (2 * DIM * FAN) + child;
                const float near_leaf = distance(box, box + DIM * FAN, FAN);
                judge_leaves(words, indices, node * FAN + child, lane < FAN || one != two ? near_leaf : INFINITE);
            }
    }
};

__device__ float choose_trial(const float* multiples, int count, float guess, int j) {
    if (INTEGERS) {
        const float step = fmaxf(floorf(SPREAD * guess + 0.5f), 1.0f), last = multiples[count - 1];
        float first = floorf(guess + 0.5f) - step * (float)(TRIALS / 2);
        first = fmaxf(fminf(first, last - step * (float)(TRIALS - 1)), multiples[0]);
        return fminf(first + step * (float)j, last);
    }
    int first = 0;
    for (int k = 1; k < count - TRIALS + 1; ++k)
        if (misfit(multiples[k + TRIALS - 1] / guess) < misfit(multiples[k - 1] / guess)) first = k;
    return multiples[first + j];
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
trellis_search(const float* x, const float* w, const float* constants, const float* rows, const Guess* guesses, const Word* words,
               const unsigned short* indices, const float* leaf_boxes, const float* node_boxes, int* chosen, int blocks, long long total) {
    __shared__ float2 values[THREADS / 32][32];
    const int lane = threadIdx.x % 32;
    const long long unit = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (unit >= total) return;
    const long long row = unit / blocks;
    const float top = rows[2 * row], d = rows[2 * row + 1];
    const Guess guess = guesses[unit];
    chosen += unit * (GROUPS + 2);
    if (top == 0 || (INTEGERS && guess.energy == 0)) {
        if (lane < GROUPS + 2) chosen[lane] = 0;
        return;
    }
    float2* mine = values[threadIdx.x / 32];
    {
        const float value = x[unit * 32 + lane] / top;
        mine[lane] = make_float2(MAGNITUDES ? fabsf(value) : value, w[(unit - row * blocks) * 32 + lane]);
    }
    __syncwarp();

    float least = INFINITE, winner = 0;
    int winner_book = 0, winner_index = 0;  // the latter of group `lane`
    for (int side = 0; side < SIDES; ++side) {
        const float* multiples = constants + TARGETS + (side ? POSITIVE : 0);
        const float trial = choose_trial(multiples, side ? NEGATIVE : POSITIVE, guess.scale / d, min(lane, TRIALS - 1));
        for (int book = 0; book < BOOKS; ++book) {
            int found = 0;  // in lane g * BATCH + j: the index for group g and trial j
            for (int start = 0; start < TRIALS; start += BATCH) {
                float multiple[BATCH], scale[BATCH], total_error[BATCH], smallest = INFINITE, largest = -INFINITE;
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    multiple[j] = __shfl_sync(ALL, trial, min(start + j, TRIALS - 1));
                    multiple[j] = side ? -multiple[j] : multiple[j];
                    scale[j] = d * multiple[j];
                    total_error[j] = 0;
                    smallest = fminf(smallest, 1.0f / scale[j]);
                    largest = fmaxf(largest, 1.0f / scale[j]);
                }
                bool alive = true;
                for (int g = 0; g < GROUPS && alive; ++g) {
                    Search s;
#pragma unroll
                    for (int i = 0; i < DIM; ++i) {
                        const float2 value = mine[g * DIM + i];
                        s.w[i] = value.y;
                        s.wx[i] = BATCH == 1 ? -2.0f * (value.y * value.x) / scale[0] : value.y * value.x;
                        s.low[i] = fminf(value.x * smallest, value.x * largest);
                        s.high[i] = fmaxf(value.x * smallest, value.x * largest);
                    }
                    const int seed = __shfl_sync(ALL, found, g * BATCH + BATCH - 1);
                    float v[DIM];
                    if (start) {
                        unsigned state = 4096u + 32768u * book + seed;
#pragma unroll
                        for (int i = 0; i < DIM; ++i) v[i] = next_value(state);
                    }
#pragma unroll
                    for (int j = 0; j < BATCH; ++j) {
                        const float inverse = 1.0f / scale[j];
                        s.ratio[j] = 2.0f * inverse;
                        s.energy[j] = 0;
#pragma unroll
                        for (int i = 0; i < DIM; ++i) {
                            const float t = mine[g * DIM + i].x * inverse;
                            s.energy[j] = __fmaf_rn(s.w[i] * t, t, s.energy[j]);
                        }
                        s.allowed[j] = total_error[j] < least ? (least - total_error[j]) * (inverse * inverse) + MARGIN * s.energy[j] : 0.0f;
                        s.best[j] = s.mine[j] = start ? s.score(s.sums(v), j) : INFINITE;
                        s.index[j] = seed;
                    }
                    s.update_limit();
                    s.search(words + book * (NODES * FAN * LEAF), indices + book * (NODES * FAN * LEAF),
                             leaf_boxes + book * (NODES * 2 * DIM * FAN), node_boxes + book * (2 * DIM * NODES), start > 0);
                    alive = false;
#pragma unroll
                    for (int j = 0; j < BATCH; ++j) {
                        const unsigned holders = __ballot_sync(ALL, s.mine[j] == s.best[j]);
                        const int index = __shfl_sync(ALL, s.index[j], __ffs(holders) - 1);
                        if (lane == g * BATCH + j) found = index;
                        total_error[j] += (scale[j] * scale[j]) * fmaxf(s.energy[j] + s.best[j], 0.0f);
                        alive |= total_error[j] < least;
                    }
                }
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const int index = __shfl_sync(ALL, found, min(lane, GROUPS - 1) * BATCH + j);
                    if (alive && total_error[j] < least) {
                        least = total_error[j];
                        winner = multiple[j];
                        winner_book = book;
                        winner_index = index;
                    }
                }
            }
        }
    }
    if (lane < GROUPS + 2) chosen[lane] = lane < GROUPS ? winner_index : lane == GROUPS ? (int)winner : winner_book;
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
