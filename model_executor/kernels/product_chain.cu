// The products between two attentions of a decoder layer in one launch: output projection, gate and up, down, and the
// product behind them (qkv of the next layer, or the head).
//
// One program a multiprocessor, and all of them run at once. One thread of each does nothing but ask for weights: its
// program's share of all four products, in order, into a ring of slots in shared memory. Weights depend on nothing, so
// their stream passes over the ends of products, and begins before the attention that stands in front has ended. What a
// product reads of the one before it (x) comes into the same slots once all programs have met in between. Eight warps
// take the slots in turn and multiply: 8 columns x 16 tokens x 16 inner elements an instruction.
//
// Elements are bfloat16, sums are float32. The host defines HIDDEN, ATTENDED, INTER (sizes of the model), NEXT (columns
// of the last product), ROWS (8 or 16, at least the tokens), NUM_SMS (programs), HAS_BIAS (of the last product) and
// MAX_WAIT_MS.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int NUM_WARPS = 8;  // that multiply; one more asks for weights
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int SUM_TOKENS = 16;
constexpr int MAX_SHARED_BYTES = 232448 - 2560;  // what is declared with a size comes off
constexpr int SLOT_ELEMENTS = 12288;
constexpr int IN_FLIGHT_BYTES = 65536;  // of weights on their way: what follows them in memory's queues has to wait

__device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }
__device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
__device__ constexpr int power_of_2(int n) { return n <= 1 ? 1 : 2 * power_of_2((n + 1) / 2); }
// Largest 64 * 2**i that divides n and is no more than `most`.
__device__ constexpr int chunk_of(int n, int most, int chunk = 64) {
    return chunk * 2 <= most && n % (chunk * 2) == 0 ? chunk_of(n, most, chunk * 2) : chunk;
}

// How y[tokens, N] = x[tokens, K] @ w[N, K].T is shared out. A program has EACH units of 8 columns and does PASS of
// them at a time, CHUNK inner elements a slot.
template <int N_, int K_, bool SILU_>
struct Product {
    static constexpr int N = N_, K = K_;
    static constexpr bool SILU = SILU_;         // w is [2 * N, K], gate above up
    static constexpr int PARTS = SILU ? 2 : 1;  // gate and up
    static constexpr int UNITS = N / 8;
    static constexpr int EACH = (UNITS + NUM_SMS - 1) / NUM_SMS;
    static constexpr int PASSES = EACH <= 8 ? 1 : SILU ? (EACH + 7) / 8 : (EACH + 3) / 4;
    static constexpr int PASS = (EACH + PASSES - 1) / PASSES;
    static constexpr int WARPS_N = SILU ? 4 : PASS <= 4 ? 1 : 2;  // that share a slot
    static constexpr int WARPS_K = NUM_WARPS / WARPS_N;           // groups of them, which take slots in turn
    static constexpr int TILES = (PASS + WARPS_N - 1) / WARPS_N;  // units of a warp
    static constexpr int ROWS_W = PASS * 8;                       // of the weight, in a slot
    static constexpr int CHUNK = chunk_of(K, min_of(K / WARPS_K, SLOT_ELEMENTS / (ROWS_W * PARTS + ROWS)));
    static constexpr int NUM_CHUNKS = K / CHUNK;
    static constexpr int W_BYTES = ROWS_W * CHUNK * 2, X_BYTES = ROWS * CHUNK * 2;
    static constexpr int BYTES = PARTS * W_BYTES + X_BYTES;
    static constexpr int MAX_IN_FLIGHT = max_of(1, IN_FLIGHT_BYTES / (PARTS * W_BYTES));  // slots
    static constexpr int COLUMNS = power_of_2(PASS) * 8;  // of y in a pass; the last ones may be unused
    static constexpr int SUMS = WARPS_K * PARTS * ROWS * COLUMNS;
    static_assert(N % 8 == 0 && K % CHUNK == 0 && NUM_CHUNKS >= WARPS_K, "no way to share out this product");

    static __device__ int first() { return blockIdx.x * EACH; }
    static __device__ int mine() { return max(0, min(EACH, UNITS - first())); }
};

using Output = Product<HIDDEN, ATTENDED, false>;
using GateUp = Product<INTER, HIDDEN, true>;
using Down = Product<HIDDEN, INTER, false>;
using Next = Product<NEXT, HIDDEN, false>;

constexpr int SLOT_BYTES = max_of(max_of(Output::BYTES, GateUp::BYTES), max_of(Down::BYTES, Next::BYTES));
constexpr int SUM_FLOATS = max_of(max_of(Output::SUMS, GateUp::SUMS), max_of(Down::SUMS, Next::SUMS));
constexpr int SUM_BYTES = (GateUp::PASSES > 1 || Next::PASSES > 1 ? 2 : 1) * SUM_FLOATS * 4;
constexpr int NUM_SLOTS = min_of(16, (MAX_SHARED_BYTES - SUM_BYTES) / SLOT_BYTES);
constexpr int KEPT = (Output::COLUMNS * ROWS + NUM_THREADS - 1) / NUM_THREADS;  // places of `stream` of a thread
static_assert(SLOT_BYTES % 1024 == 0, "a swizzled row of 8 x 128 bytes");
static_assert(NUM_SLOTS >= NUM_WARPS, "a parity tells one fill of a slot from the next only");
static_assert(Output::PASSES == 1 && Output::COLUMNS <= 32, "a warp sums up the squares of its program's columns");

// What the host needs to know.
extern "C" __device__ const int plan[] = {NUM_SLOTS * SLOT_BYTES + SUM_BYTES,
                                          Output::ROWS_W, Output::CHUNK, GateUp::ROWS_W, GateUp::CHUNK,
                                          Down::ROWS_W,   Down::CHUNK,   Next::ROWS_W,   Next::CHUNK};

struct __align__(64) Map {  // a CUtensorMap of [K / 64][rows][64] elements; 128 bytes of a row are swizzled
    char opaque[128];
};

struct Arguments {
    const u16 *post_norm, *next_norm, *bias;
    u16 *stream, *scaled_mlp, *activated, *scaled_next, *out;
    float *mlp_sums, *next_sums;  // [NUM_SMS, SUM_TOKENS]
    u64* counters;                // [3], of programs that have ended each product but the last
    int num_tokens;
    float eps;
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void wait_parity(u32 barrier, u32 parity) {
    u32 is_done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(is_done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!is_done);
}

__device__ __forceinline__ void arrive(u32 barrier, u32 count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy(u32 to, const Map& from, int row, int k, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(&from), "r"(0), "r"(row), "r"(k / 64), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four fragments of 8 rows x 8 inner elements, those from k32 * 32 on. `rows` is a multiple of 1024.
__device__ __forceinline__ uint4 load_fragments(u32 rows, int k32) {
    const int lane = threadIdx.x % 32, row = lane % 8, part = (k32 % 2) * 4 + lane / 8;
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(rows + row * 128 + ((part ^ row) << 4)));
    return v;
}

// Past the L1, which may hold what stood there before this launch.
__device__ __forceinline__ float load_fresh(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ float to_float(u16 v) { return __uint_as_float((u32)v << 16); }

__device__ __forceinline__ u16 to_bfloat16(float v) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
}

__device__ __forceinline__ u64 now_ns() {
    u64 v;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v));
    return v;
}

// Until all programs have ended a product. They cannot if they do not all run, and that must not take for ever.
__device__ __forceinline__ void wait_for_all(const u64* counter, u64 target) {
    u64 count, begin = 0;
    for (u32 tries = 1;; tries++) {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(count) : "l"(counter) : "memory");
        if (count >= target) return;
        if (tries % 65536) continue;  // the clock takes longer than an answer
        if (!begin) begin = now_ns();
        if (now_ns() - begin > MAX_WAIT_MS * 1000000ull) __trap();
    }
}

// All warps that multiply.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(NUM_THREADS) : "memory"); }

// A position in the ring of slots.
struct Ring {
    u32 slots, weights, x, empty;  // shared memory, and three barriers a slot
    int slot = 0;
    u32 parity = 0;

    __device__ void advance(int n = 1) {
        slot += n;
        const int rounds = slot / NUM_SLOTS;
        slot -= rounds * NUM_SLOTS;
        parity ^= rounds % 2;
    }
    __device__ u32 data() const { return slots + slot * SLOT_BYTES; }
    __device__ u32 has_weights() const { return weights + slot * 8; }
    __device__ u32 has_x() const { return x + slot * 8; }
    __device__ u32 is_empty() const { return empty + slot * 8; }
};

// The thread that asks for weights and x.
struct Producer {
    Ring ring, landed;  // the next slot, and the oldest whose weights have not been waited for
    int num_in_flight;  // slots from there on that have been asked for
    u64 weight_policy, x_policy;

    template <class P>
    __device__ __forceinline__ void ask_weights(const Ring& to, const Map& weight, int s) {
        const int row = (P::first() + s / P::NUM_CHUNKS * P::PASS) * 8, k = s % P::NUM_CHUNKS * P::CHUNK;
        wait_parity(to.is_empty(), to.parity ^ 1);
        for (; num_in_flight >= min_of(P::MAX_IN_FLIGHT, NUM_SLOTS); num_in_flight--, landed.advance())
            wait_parity(landed.has_weights(), landed.parity);
        num_in_flight++;
        arrive_expecting(to.has_weights(), P::PARTS * P::W_BYTES);
        copy(to.data(), weight, row, k, to.has_weights(), weight_policy);
        if (P::SILU) copy(to.data() + P::W_BYTES, weight, P::N + row, k, to.has_weights(), weight_policy);
    }

    template <class P>
    __device__ __forceinline__ void ask_x(const Map& x, int s) {
        arrive_expecting(ring.has_x(), P::X_BYTES);
        copy(ring.data() + P::PARTS * P::W_BYTES, x, 0, s % P::NUM_CHUNKS * P::CHUNK, ring.has_x(), x_policy);
        ring.advance();
    }

    // All of a product: weights as far as the ring goes, then `wait` for x, then both in step.
    template <class P, class Wait>
    __device__ __forceinline__ void produce(const Map& weight, const Map& x, Wait wait) {
        const int total = (P::mine() + P::PASS - 1) / P::PASS * P::NUM_CHUNKS, ahead = min(total, NUM_SLOTS);
        Ring to = ring;
        for (int s = 0; s < ahead; s++, to.advance()) ask_weights<P>(to, weight, s);
        wait();
        asm volatile("fence.proxy.async;" ::: "memory");
        for (int s = 0; s < ahead; s++) ask_x<P>(x, s);
        for (int s = ahead; s < total; s++) {
            ask_weights<P>(ring, weight, s);
            ask_x<P>(x, s);
        }
    }
};

// A warp's units of one slot.
template <class P>
__device__ __forceinline__ void multiply_slot(float (&acc)[P::PARTS][P::TILES][2][4], u32 data, int warp_n) {
#pragma unroll
    for (int k32 = 0; k32 < P::CHUNK / 32; k32++) {
        const u32 x = data + P::PARTS * P::W_BYTES + k32 / 2 * (ROWS * 128);
        const uint4 low = load_fragments(x, k32);
        uint4 high = {0, 0, 0, 0};
        if (ROWS == 16) high = load_fragments(x + 1024, k32);
#pragma unroll
        for (int i = 0; i < P::TILES; i++) {
            const int unit = warp_n * P::TILES + i;
            if (P::WARPS_N * P::TILES > P::PASS && unit >= P::PASS) break;
#pragma unroll
            for (int part = 0; part < P::PARTS; part++) {
                const u32 rows = data + part * P::W_BYTES + k32 / 2 * (P::ROWS_W * 128) + unit * 1024;
                const uint4 w = load_fragments(rows, k32);
                multiply(acc[part][i][0], low.x, high.x, low.y, high.y, w.x, w.y);
                multiply(acc[part][i][1], low.z, high.z, low.w, high.w, w.z, w.w);
            }
        }
    }
}

enum Kind { OUTPUT, GATE_UP, DOWN, NEXT_PRODUCT };

// All of a product, by the warps that multiply.
// kept: the thread's places of the residual; norm: weights of the norm that follows, for the same places.
template <class P, Kind KIND>
__device__ __forceinline__ void consume(Ring& ring, const Arguments& a, float* sums, float (*warp_squares)[SUM_TOKENS],
                                        u16 (&kept)[KEPT], const u16 (&norm)[KEPT]) {
    constexpr bool HAS_NORM = KIND == GATE_UP || KIND == NEXT_PRODUCT;
    constexpr int WIDTH = P::COLUMNS;
    constexpr int REPEATS = (WIDTH * ROWS + NUM_THREADS - 1) / NUM_THREADS;
    constexpr int GATHERED = HAS_NORM ? (NUM_SMS + 15) / 16 : 1;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int warp_n = warp % P::WARPS_N, warp_k = warp / P::WARPS_N;
    const int mine = P::mine(), num_passes = (mine + P::PASS - 1) / P::PASS;
    float squares[GATHERED];
    for (int pass = 0; pass < num_passes; pass++) {
        float acc[P::PARTS][P::TILES][2][4] = {};
        Ring turn = ring;
        turn.advance(warp_k);
        ring.advance(P::NUM_CHUNKS);
        for (int chunk = warp_k; chunk < P::NUM_CHUNKS; chunk += P::WARPS_K, turn.advance(P::WARPS_K)) {
            // This warp may be ahead of the one that had the slot before: until that is done, a parity is ambiguous.
            wait_parity(turn.is_empty(), turn.parity ^ 1);
            wait_parity(turn.has_weights(), turn.parity);
            wait_parity(turn.has_x(), turn.parity);
            multiply_slot<P>(acc, turn.data(), warp_n);
            __syncwarp();
            if (lane == 0) arrive(turn.is_empty(), P::WARPS_K);
            if (HAS_NORM && pass == 0 && chunk == warp_k) {
                // Sums of squares: x is here, so they are, and their latency passes while the warp multiplies.
                const float* from = KIND == GATE_UP ? a.mlp_sums : a.next_sums;
#pragma unroll
                for (int i = 0; i < GATHERED; i++) {
                    const int program = i * 16 + tid / 16;
                    squares[i] = program < NUM_SMS ? load_fresh(from + program * SUM_TOKENS + tid % 16) : 0.0f;
                }
            }
        }
        if (HAS_NORM && pass == 0) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < GATHERED; i++) sum += squares[i];
            sum += __shfl_xor_sync(~0u, sum, 16);
            if (lane < 16) warp_squares[warp][lane] = sum;
        }
        // Warps add up through shared memory: one pass may still be read while the next is written.
        float* parts = sums + (pass % 2) * SUM_FLOATS;
#pragma unroll
        for (int i = 0; i < P::TILES; i++) {
            const int column = (warp_n * P::TILES + i) * 8;
            if (P::WARPS_N * P::TILES * 8 > WIDTH && column >= WIDTH) break;
#pragma unroll
            for (int part = 0; part < P::PARTS; part++) {
                float* to = parts + ((warp_k * P::PARTS + part) * ROWS + lane / 4) * WIDTH + column + 2 * (lane % 4);
                const float *c0 = acc[part][i][0], *c1 = acc[part][i][1];
                *(float2*)to = make_float2(c0[0] + c1[0], c0[1] + c1[1]);
                if (ROWS == 16) *(float2*)(to + 8 * WIDTH) = make_float2(c0[2] + c1[2], c0[3] + c1[3]);
            }
        }
        meet();
        const int units = min(P::PASS, mine - pass * P::PASS);
#pragma unroll
        for (int r = 0; r < REPEATS; r++) {
            const int place = tid + r * NUM_THREADS, token = place / WIDTH, column = place % WIDTH;
            if (WIDTH * ROWS % NUM_THREADS && place >= WIDTH * ROWS) break;
            const bool is_used = token < a.num_tokens && column < units * 8;
            const int n = (P::first() + pass * P::PASS) * 8 + column;
            const long long to = (long long)token * P::N + n;
            float value = 0.0f, up = 0.0f;
#pragma unroll
            for (int k = 0; k < P::WARPS_K; k++) {
                const float* from = parts + (k * P::PARTS * ROWS + token) * WIDTH + column;
                value += from[0];
                if (P::SILU) up += from[ROWS * WIDTH];
            }
            if (HAS_NORM) {
                float sum = 0.0f;
#pragma unroll
                for (int w = 0; w < NUM_WARPS; w++) sum += warp_squares[w][token];
                const float rstd = rsqrtf(sum / P::K + a.eps);
                value *= rstd;
                up *= rstd;
            }
            if (KIND == GATE_UP) {
                if (is_used) a.activated[to] = to_bfloat16(value / (1.0f + __expf(-value)) * up);
            } else if (KIND == NEXT_PRODUCT) {
                if (HAS_BIAS && is_used) value += to_float(a.bias[n]);
                if (is_used) a.out[to] = to_bfloat16(value);
            } else {
                const u16 rounded = to_bfloat16(value + to_float(kept[r]));
                const float y = is_used ? to_float(rounded) : 0.0f;
                kept[r] = rounded;
                float square = y * y;
#pragma unroll
                for (int offset = WIDTH / 2; offset; offset /= 2) square += __shfl_xor_sync(~0u, square, offset);
                if (is_used) {
                    (KIND == OUTPUT ? a.scaled_mlp : a.scaled_next)[to] = to_bfloat16(y * to_float(norm[r]));
                    if (KIND == DOWN) a.stream[to] = rounded;
                    float* program_sums = (KIND == OUTPUT ? a.mlp_sums : a.next_sums) + blockIdx.x * SUM_TOKENS;
                    if (column == 0) program_sums[token] = square;
                }
            }
        }
    }
    if (KIND != NEXT_PRODUCT) {
        meet();
        if (tid == 0) asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(a.counters + KIND) : "memory");
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS + 32, 1)
    product_chain(const __grid_constant__ Map w_output, const __grid_constant__ Map w_gate_up,
                  const __grid_constant__ Map w_down, const __grid_constant__ Map w_next,
                  const __grid_constant__ Map x_output, const __grid_constant__ Map x_gate_up,
                  const __grid_constant__ Map x_down, const __grid_constant__ Map x_next,
                  const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ __align__(8) u64 barriers[3 * NUM_SLOTS];
    __shared__ float warp_squares[2][NUM_WARPS][SUM_TOKENS];
    Ring ring;
    ring.slots = shared_address(shared);
    ring.weights = shared_address(barriers);
    ring.x = ring.weights + NUM_SLOTS * 8;
    ring.empty = ring.x + NUM_SLOTS * 8;
    u16 kept[KEPT] = {}, post_norm[KEPT] = {}, next_norm[KEPT] = {};
    u64 count = 0;
    if (threadIdx.x < NUM_THREADS) {
        // Asked for before the weights are: behind these, memory takes microseconds to answer. The kernel in front,
        // which may still run, writes none of it.
#pragma unroll
        for (int r = 0; r < KEPT; r++) {
            const int place = threadIdx.x + r * NUM_THREADS, token = place / Output::COLUMNS;
            const int column = place % Output::COLUMNS, n = Output::first() * 8 + column;
            if (column < Output::mine() * 8 && token < a.num_tokens) {
                kept[r] = a.stream[token * HIDDEN + n];
                post_norm[r] = a.post_norm[n];
                next_norm[r] = a.next_norm[n];
            }
        }
    } else if (threadIdx.x == NUM_THREADS) {
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(count) : "l"(a.counters) : "memory");
        if (Output::mine() == 0 && count == ~0ull) __trap();  // waits for it, see below
        for (int i = 0; i < NUM_SLOTS; i++) {
            init_barrier(ring.weights + i * 8, 1);
            init_barrier(ring.x + i * 8, 1);
            init_barrier(ring.empty + i * 8, NUM_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == NUM_THREADS) {
        Producer producer = {ring, ring, 0};
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(producer.weight_policy));
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(producer.x_policy));
        producer.produce<Output>(w_output, x_output, [&] {
            asm volatile("griddepcontrol.wait;" ::: "memory");  // attention
            if (count == ~0ull) __trap();  // never; but the count must be known before this program adds to it
        });
        // Every launch adds NUM_SMS to each counter, and nobody passes the first before this program has added its one.
        const u64 target = (count / NUM_SMS + 1) * NUM_SMS;
        producer.produce<GateUp>(w_gate_up, x_gate_up, [&] { wait_for_all(a.counters + OUTPUT, target); });
        producer.produce<Down>(w_down, x_down, [&] { wait_for_all(a.counters + GATE_UP, target); });
        producer.produce<Next>(w_next, x_next, [&] { wait_for_all(a.counters + DOWN, target); });
    } else if (threadIdx.x < NUM_THREADS) {
        float* sums = (float*)(shared + NUM_SLOTS * SLOT_BYTES);
        consume<Output, OUTPUT>(ring, a, sums, nullptr, kept, post_norm);
        consume<GateUp, GATE_UP>(ring, a, sums, warp_squares[0], kept, post_norm);
        consume<Down, DOWN>(ring, a, sums, nullptr, kept, next_norm);
        consume<Next, NEXT_PRODUCT>(ring, a, sums, warp_squares[1], kept, next_norm);
    }
}
