"""Programs that run kernels of `kernels_on_host` on random numbers, to look for data races."""

from __future__ import annotations

NUMBERS = """
static std::vector<float> numbers(size_t n) {
    static unsigned state = 1;
    std::vector<float> x(n);
    for (auto& v : x) {
        state = state * 1664525u + 1013904223u;
        v = (float)(state >> 8) / 8388608.0f - 1.0f;
    }
    return x;
}
"""
MAIN_ATTENTION = (
    NUMBERS
    + """
int main() {
    const int capacity = 512;
    auto q = numbers(ROWS * HEADS * DK), k = numbers(ROWS * HEADS_KV * DK);
    auto v = numbers(ROWS * HEADS_KV * DV), norm = numbers(DK);
    auto angles = numbers(ROWS * N_ROT);
    std::vector<u8> cache_k((size_t)capacity * HEADS_KV * ROW_K);
    std::vector<u8> cache_v((size_t)capacity * HEADS_KV * ROW_V);
    std::vector<float> out(ROWS * HEADS * DV);
    for (int position : {0, 61, 300})
        run(4, q.data(), k.data(), v.data(), norm.data(), norm.data(), 1e-6f, angles.data(),
            cache_k.data(), cache_v.data(), &position, 0.1f, q.data(), k.data(), v.data(), q.data(),
            out.data());
}
"""
)
MAIN_ROUTER = (
    NUMBERS
    + """
int main() {
    auto h = numbers(ROWS * WIDTH), norm = numbers(WIDTH), matrix = numbers(EXPERTS * WIDTH);
    std::vector<int> ids(ROWS * N_USED);
    std::vector<float> weights(ROWS * (N_USED + SHARED_SLOTS));
    run(h.data(), norm.data(), 1e-6f, matrix.data(), h.data(), h.data(), norm.data(), ids.data(),
        weights.data());
}
"""
)
MAIN_SAMPLE = (
    NUMBERS
    + """
int main() {
    const int n = 3000;
    auto values = numbers(n);
    std::vector<long long> ids(n), tokens(8);
    std::vector<int> positions(8, 5), history(20);
    const u64 seed = 7;
    greedy(values.data(), n, 3, tokens.data(), positions.data(), history.data());
    draw(values.data(), ids.data(), n, 40, 0.8, 0.95, 0.05, &seed, tokens.data(), positions.data(),
         history.data());
    best(values.data(), n, 40, 0.8, 0.95, 0.05, &seed, tokens.data(), positions.data(),
         history.data());
}
"""
)


MAIN_EXPERTS = (
    NUMBERS
    + """
int main() {
    const int tokens = 5, experts = 40, used = 4, n = 20;
    auto logits = numbers(2 * tokens * experts), weights = numbers(tokens * used);
    std::vector<int> ids(n), ends(experts), sources(n), rows(n);
    route(logits.data(), 2, logits.data(), tokens, experts, used, used, 0.0f, 1, 1, 1.0f, 4, 2, 2,
          logits.data(), ids.data(), weights.data());
    for (int& id : ids) id = id % 2 - (id % 7 == 0);
    group(ids.data(), n, 2, ends.data(), sources.data(), rows.data());
}
"""
)
MAIN_STATE_SPACE = (
    NUMBERS
    + """
int main() {
    auto products = numbers(ROWS * PITCH), taps = numbers(CHANNELS * TAPS), a = numbers(HEADS);
    auto bias = numbers(CHANNELS), weight = numbers(INNER), inputs = numbers(PAST * CHANNELS);
    auto memory = numbers(HEADS * STATE * LENGTH);
    std::vector<float> out(ROWS * INNER);
    run(products.data(), taps.data(), bias.data(), a.data(), a.data(), a.data(), inputs.data(),
        memory.data(), nullptr, nullptr, nullptr, nullptr, weight.data(), 1e-6f, out.data());
}
"""
)
MAIN_KIMI_DELTA = (
    NUMBERS
    + """
int main() {
    auto x = numbers(ROWS * INNER), beta = numbers(ROWS * HEADS), taps = numbers(CHANNELS * TAPS);
    auto dt = numbers(INNER), a = numbers(HEADS), norm = numbers(LENGTH);
    auto inputs = numbers(PAST * CHANNELS), memory = numbers(HEADS * LENGTH * LENGTH);
    std::vector<float> out(ROWS * INNER);
    run(x.data(), x.data(), x.data(), x.data(), x.data(), beta.data(), taps.data(), dt.data(),
        a.data(), norm.data(), 1e-6f, inputs.data(), memory.data(), nullptr, nullptr, nullptr,
        nullptr, out.data());
}
"""
)
MAIN_DELTA = (
    NUMBERS
    + """
int main() {
    auto h = numbers(ROWS * WIDTH), norm = numbers(WIDTH), a = numbers(VALUE_HEADS);
    auto rates = numbers(2 * VALUE_HEADS * WIDTH), products = numbers(ROWS * PITCH);
    auto z = numbers(ROWS * Z_PITCH), taps = numbers(CHANNELS * TAPS), weight = numbers(VALUE);
    auto inputs = numbers(PAST * CHANNELS), memory = numbers(VALUE_HEADS * KEY * VALUE);
    std::vector<float> out(ROWS * VALUE_HEADS * VALUE);
    run(h.data(), norm.data(), 1e-6f, rates.data(), a.data(), a.data(), products.data(), z.data(),
        taps.data(), weight.data(), 1e-6f, inputs.data(), memory.data(), nullptr, nullptr, nullptr,
        nullptr, out.data());
}
"""
)
MAIN_PROMPT_DELTA = (
    NUMBERS
    + """
int main() {
    const int tokens = 70, n_chunks = 2, padded = n_chunks * CHUNK;
    const int pitch = JOINED ? KEY_HEADS * TURN : CHANNELS;
    std::vector<u16> products(tokens * pitch), z(tokens * VALUE_HEADS * VALUE), out(z.size());
    auto taps = numbers(CHANNELS * TAPS), past = numbers(PAST * CHANNELS), a = numbers(VALUE_HEADS);
    std::vector<u16> q(KEY_HEADS * padded * KEY), k = q, keys(VALUE_HEADS * padded * KEY);
    std::vector<u16> qk(VALUE_HEADS * padded * CHUNK);
    auto v = numbers(VALUE_HEADS * padded * VALUE), values = v;
    auto rates = numbers(tokens * 2 * VALUE_HEADS);
    auto since = numbers(VALUE_HEADS * padded), until = since;
    auto memory = numbers(VALUE_HEADS * KEY * VALUE), weight = numbers(VALUE);
    std::vector<float> states(n_chunks * memory.size());
    run_heads(products.data(), pitch, tokens, padded, past.data(), taps.data(), q.data(), k.data(),
              v.data(), 1);
    run_solve(rates.data(), a.data(), a.data(), tokens, q.data(), k.data(), v.data(),
              values.data(), keys.data(), qk.data(), since.data(), until.data(), n_chunks,
              VALUE_HEADS);
    run_chunks(values.data(), keys.data(), k.data(), since.data(), until.data(), n_chunks,
               memory.data(), memory.data(), states.data(), VALUE_HEADS);
    run_results(q.data(), states.data(), qk.data(), values.data(), since.data(), z.data(),
                VALUE_HEADS * VALUE, weight.data(), 1e-6f, tokens, out.data(), n_chunks,
                VALUE_HEADS);
}
"""
)


MAIN_PROMPT_KIMI_DELTA = (
    NUMBERS
    + """
int main() {
    const int tokens = 70, n_chunks = 2, padded = n_chunks * CHUNK;
    std::vector<u16> products(tokens * CHANNELS), decay(tokens * VALUE_HEADS * VALUE);
    auto z = decay, out = decay;
    auto taps = numbers(CHANNELS * TAPS), past = numbers(PAST * CHANNELS), a = numbers(VALUE_HEADS);
    std::vector<u16> q(KEY_HEADS * padded * KEY), k = q, keys = q;
    std::vector<u16> qk(VALUE_HEADS * padded * CHUNK);
    auto v = numbers(VALUE_HEADS * padded * VALUE), values = v;
    auto rates = numbers(tokens * VALUE_HEADS), dt = numbers(VALUE_HEADS * KEY);
    auto whole = numbers(VALUE_HEADS * n_chunks * KEY);
    auto memory = numbers(VALUE_HEADS * KEY * VALUE), weight = numbers(VALUE);
    std::vector<float> states(n_chunks * memory.size());
    run_heads(products.data(), CHANNELS, tokens, padded, past.data(), taps.data(), q.data(),
              k.data(), v.data(), 1);
    run_solve(decay.data(), VALUE_HEADS * VALUE, rates.data(), dt.data(), a.data(), tokens,
              q.data(), k.data(), v.data(), values.data(), keys.data(), qk.data(), whole.data(),
              n_chunks, VALUE_HEADS);
    run_chunks(values.data(), keys.data(), k.data(), whole.data(), whole.data(), n_chunks,
               memory.data(), memory.data(), states.data(), VALUE_HEADS);
    run_results(q.data(), states.data(), qk.data(), values.data(), whole.data(), z.data(),
                VALUE_HEADS * VALUE, weight.data(), 1e-6f, tokens, out.data(), n_chunks,
                VALUE_HEADS);
}
"""
)


MAIN_PROMPT_STATE_SPACE = (
    NUMBERS
    + """
int main() {
    const int tokens = 70, n_chunks = 2, padded = n_chunks * CHUNK;
    std::vector<u16> products(tokens * PITCH), x(HEADS * padded * LENGTH);
    std::vector<u16> b(GROUPS * padded * STATE), c = b, out(tokens * INNER);
    auto taps = numbers(CHANNELS * TAPS), past = numbers(PAST * CHANNELS), a = numbers(HEADS);
    auto bias = numbers(CHANNELS), weight = numbers(INNER);
    auto memory = numbers(HEADS * STATE * LENGTH);
    std::vector<float> steps(HEADS * padded), until = steps, y(out.size());
    std::vector<float> states(n_chunks * memory.size());
    std::vector<double> totals(steps.size());
    run_convolved(products.data(), tokens, padded, past.data(), taps.data(), bias.data(), x.data(),
                  b.data(), c.data(), 1);
    run_decays(products.data(), a.data(), a.data(), tokens, steps.data(), until.data(),
               totals.data(), n_chunks, HEADS);
    run_chunks(x.data(), b.data(), until.data(), totals.data(), n_chunks, memory.data(),
               memory.data(), states.data(), HEADS);
    run_results(products.data(), x.data(), b.data(), c.data(), states.data(), steps.data(),
                totals.data(), a.data(), tokens, y.data(), n_chunks, HEADS);
    run_norm(y.data(), weight.data(), 1e-6f, out.data(), tokens);
}
"""
)
