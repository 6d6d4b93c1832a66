// One token for each row of logits, on the device:
//
//   s = bias + penalty(l)      w = exp((s − max s) / T)      kept = top_k, then top_p, then min_p, of s in falling order
//   token = the first of kept whose running sum of w exceeds u(seed, choice, position) · Σ kept w;   T = 0: argmax s
//
// and log softmax(l) of the token and of the largest num_logprobs.  Falling order: larger score first, lower id first
// among equals.  Nothing is sorted but a short list, and nothing depends on the other rows: weights are integers in
// units of 2^-44, so every sum is exact in any order, and whichever way an element is found it is the same element.
//
//   row_logits    u64  [R]                address of the row's logits, fp32 [⌈V/4⌉·4], 16-byte aligned
//   row_slot      i32  [R]                −1: padding, skipped
//   base_length   i32  [R]                outputs go to step length[slot] − base_length[row]
//   records       Record [slots]          parameters of a slot, draw.cuh
//   bias_ids, bias_values  i32, f64 [slots][kMaxBias]   ids of a slot differ
//   seen          u32  [slots][⌈V/32⌉]    bit i%32 of word i/32: token i was seen; the drawn token is added
//   scores        f32  [R][⌈V/4⌉·4]       scratch: s of rows with a penalty or a bias
//   best          u64  [R][2][chunks]     scratch: largest entry (select.cuh) of each chunk, of l and of s
//   maxima        u32  [R][2][groups]     scratch: largest key of every 32 elements, of l and of s; groups = 64·chunks
//   mass          u64  [R][chunks]        scratch: Σ exp(l − largest l of the chunk), in units of 2^-44
//   token, length i32  [slots]            token is written; length grows by `advance`
//   out_tokens    i32  [steps][R]         −1: the row's largest logit is not finite (token[slot] is then 0)
//                                         −2: the row had ended, here and behind
//   out_logprobs  f32  [steps][R][1+20]   the token's, then those of out_top
//   out_top       i32  [steps][R][20]
//
// A row ends with the token for position `end` of its record, or with the first that is one of its stops: token[slot] is
// then −2 (embed.cu takes it for padding), and of a row that has ended a decode step leaves everything as it is, but
// for out_tokens: what lies behind the first −2 there, of its steps, is old.
//
// V < 2^19.  Two launches: sample_scan, a block a (chunk of 2048, row), reads the logits once; sample_finish, a block
// a row, ends at once for argmax, else works on the few groups of 32 that can hold a kept element, and on the whole
// row only where those do not decide.  Bytes: 4·V a row; where the list does not decide 24·V to 48·V more, from L2.
// Scores are formed in fp64 and rounded to fp32 once; exp is good to 2^-23; log and what is around it is fp64.
#include "draw.cuh"

constexpr int kScanThreads = 256;
constexpr int kChunk = 2048;
constexpr int kPerThread = kChunk / kScanThreads;  // two vectors of 4, half a chunk apart
constexpr int kGroupsPerChunk = kChunk / kGroup;
constexpr int kMaxBias = 300;
constexpr i32 kNotFinite = -1, kEnded = -2, kNoStop = -3;
constexpr float kLargest = 3.4028234663852886e38f;
static_assert(kPerThread == 8 && kChunk % kGroup == 0, "load_keys and write_group_maxima are written out for these");

// ---- sample_scan ----------------------------------------------------------------------------------------------

// Element i of a thread: two vectors of four, each vector of a warp next to that of the next lane.
DEVICE i32 element_id(i32 first, int i) { return first + i / 4 * (kChunk / 2) + 4 * threadIdx.x + i % 4; }

DEVICE void load_keys(u32 (&keys)[kPerThread], const uint4* words, i32 first, i32 vocab) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i32 id = element_id(first, 4 * half);
    const uint4 bits = id < vocab ? load_global(words + id / 4) : uint4{0, 0, 0, 0};
    keys[4 * half + 0] = id + 0 < vocab ? key_of(bits.x) : kNoKey;
    keys[4 * half + 1] = id + 1 < vocab ? key_of(bits.y) : kNoKey;
    keys[4 * half + 2] = id + 2 < vocab ? key_of(bits.z) : kNoKey;
    keys[4 * half + 3] = id + 3 < vocab ? key_of(bits.w) : kNoKey;
  }
}

DEVICE u64 chunk_best(u64* warps, const u32 (&keys)[kPerThread], i32 first) {
  u64 best = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const u64 entry = entry_of(keys[i], element_id(first, i));
    best = entry > best ? entry : best;
  }
  return block_max(warps, best);
}

// maxima: of this chunk.  Eight neighbouring lanes hold a group.
DEVICE void write_group_maxima(u32* maxima, const u32 (&keys)[kPerThread]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 largest = max(max(keys[4 * half], keys[4 * half + 1]), max(keys[4 * half + 2], keys[4 * half + 3]));
    for (int mask = 4; mask > 0; mask /= 2) largest = max(largest, shuffle_xor(largest, mask));
    if (threadIdx.x % 8 == 0) maxima[half * kGroupsPerChunk / 2 + threadIdx.x / 8] = largest;
  }
}

DEVICE u64 chunk_mass(u64* warps, const u32 (&keys)[kPerThread], float largest) {
  u64 mass = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i)
    if (keys[i] != kNoKey) mass += weight_of(score_of(keys[i]), largest, kLog2E, kLog2ELow);
  return block_sum(warps, mass);
}

struct Adjustment {  // of one slot
  double penalty, inverse_penalty;
  const u32* seen;
  const i32* bias_ids;
  const double* bias_values;
  int num_bias;
};

DEVICE double penalised(const Adjustment& adjustment, float logit, i32 id) {
  const double score = logit;
  if (adjustment.penalty == 1 || !(adjustment.seen[id / 32] >> id % 32 & 1)) return score;
  return score * (score > 0 ? adjustment.inverse_penalty : adjustment.penalty);
}

DEVICE float rounded(double score) { return fminf(fmaxf(static_cast<float>(score), -kLargest), kLargest); }

// Ids of a slot's bias differ.
DEVICE void add_bias(float* chunk, const Adjustment& adjustment, const float* logits, i32 first, i32 vocab) {
  for (int entry = threadIdx.x; entry < adjustment.num_bias; entry += kScanThreads) {
    const i32 id = adjustment.bias_ids[entry];
    if (id >= first && id < min(first + kChunk, vocab))
      chunk[id - first] = rounded(penalised(adjustment, logits[id], id) + adjustment.bias_values[entry]);
  }
}

// Scores in place of logits: in `keys`, in `chunk` (shared) and in `scores`.
DEVICE void adjust(u32 (&keys)[kPerThread], float* chunk, float* scores, const Adjustment& adjustment,
                   const float* logits, i32 first, i32 vocab) {
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const i32 id = element_id(first, i);
    if (id < vocab) chunk[id - first] = rounded(penalised(adjustment, score_of(keys[i]), id));
  }
  __syncthreads();
  add_bias(chunk, adjustment, logits, first, vocab);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const i32 id = element_id(first, i);
    if (id >= vocab) continue;
    scores[id] = chunk[id - first];
    keys[i] = key_of(__float_as_uint(chunk[id - first]));
  }
}

extern "C" __global__ void __launch_bounds__(kScanThreads)
    sample_scan(const u64* row_logits, const i32* row_slot, const Record* records, const i32* bias_ids,
                const double* bias_values, const u32* seen, float* scores, u64* best, u32* maxima, u64* mass,
                i32 vocab) {
  __shared__ u64 warps[kScanThreads / 32];
  __shared__ float adjusted[kChunk];
  dependency_wait();
  dependency_launch();
  const int row = blockIdx.y, chunk = blockIdx.x, num_chunks = gridDim.x;
  const i32 slot = row_slot[row], first = chunk * kChunk;
  if (slot < 0) return;
  const float* logits = reinterpret_cast<const float*>(row_logits[row]);
  u32 keys[kPerThread];
  load_keys(keys, reinterpret_cast<const uint4*>(logits), first, vocab);
  const Record& record = records[slot];
  best += 2 * row * num_chunks + chunk;
  maxima += (2 * row * num_chunks + chunk) * kGroupsPerChunk;

  const u64 raw = chunk_best(warps, keys, first);
  if (threadIdx.x == 0) best[0] = raw;
  if (record.num_logprobs > 0 || !is_argmax(record)) write_group_maxima(maxima, keys);
  if (record.num_logprobs > 0) {
    const u64 sum = chunk_mass(warps, keys, score_of(entry_key(raw)));
    if (threadIdx.x == 0) mass[row * num_chunks + chunk] = sum;
  }
  if (!adjusts(record)) return;

  const Adjustment adjustment = {record.penalty,
                                 record.inverse_penalty,
                                 seen + static_cast<u64>(slot) * ((vocab + 31) / 32),
                                 bias_ids + slot * kMaxBias,
                                 bias_values + slot * kMaxBias,
                                 record.num_bias};
  adjust(keys, adjusted, scores + static_cast<u64>(row) * ((vocab + 3) / 4 * 4), adjustment, logits, first, vocab);
  const u64 adjusted_best = chunk_best(warps, keys, first);
  if (threadIdx.x == 0) best[num_chunks] = adjusted_best;
  write_group_maxima(maxima + num_chunks * kGroupsPerChunk, keys);
}

// ---- sample_finish --------------------------------------------------------------------------------------------

// By every warp for itself.
DEVICE u64 best_of_row(const u64* best, int num_chunks) {
  u64 largest = 0;
  for (int chunk = threadIdx.x % 32; chunk < num_chunks; chunk += 32)
    largest = best[chunk] > largest ? best[chunk] : largest;
  return warp_max(largest);
}

// By one warp: log Σ exp(l − largest) from the chunks' sums.
DEVICE double log_mass(const u64* best, const u64* mass, int num_chunks, double largest) {
  u64 sum = 0;
  for (int chunk = threadIdx.x % 32; chunk < num_chunks; chunk += 32)
    sum += static_cast<u64>(static_cast<double>(mass[chunk]) * exp(score_of(entry_key(best[chunk])) - largest));
  return log(static_cast<double>(warp_sum(sum)) * kWeightUnit);
}

// By one warp: entry 0 is the drawn token's, the others those of the list.
DEVICE void write_logprobs(float* logprobs, i32* top, int count, float drawn, double largest, double log_sum) {
  const int place = threadIdx.x % 32;
  if (place > count) return;
  const u64 entry = block.list[max(place - 1, 0)];
  const float logit = place ? score_of(entry_key(entry)) : drawn;
  logprobs[place] = fmaxf(static_cast<float>(logit - largest - log_sum), -kLargest);
  if (place) top[place - 1] = entry_id(entry);
}

// One of a slot's stops for each lane.
DEVICE i32 load_stop(const Record& record) {
  const int lane = threadIdx.x % 32;
  return lane < kMaxStops ? record.stops[lane] : kNoStop;
}

extern "C" __global__ void __launch_bounds__(kSelectThreads, 1)
    sample_finish(const u64* row_logits, const i32* row_slot, const i32* base_length, const Record* records,
                  const float* scores, const u64* best, const u32* maxima, const u64* mass, u32* seen, i32* token,
                  i32* length, i32* out_tokens, float* out_logprobs, i32* out_top, i32 vocab, i32 num_chunks,
                  i32 num_steps, i32 advance) {
  dependency_wait();
  dependency_launch();
  const int row = blockIdx.x, num_rows = gridDim.x, num_groups = num_chunks * kGroupsPerChunk;
  best += 2 * row * num_chunks;
  const u64 best_logit = best_of_row(best, num_chunks);
  const i32 slot = row_slot[row];
  if (slot < 0) return;
  const Record record = records[slot];
  const bool sampled = !is_argmax(record), adjusted = adjusts(record), ranked = record.num_logprobs > 0;
  const i32 stop = load_stop(records[slot]), stored = length[slot], step = stored - base_length[row];
  if (advance && token[slot] < 0) {
    const i32 behind = max(step, 0);  // what it drew in this plan, if anything
    if (threadIdx.x == 0 && behind < num_steps) out_tokens[static_cast<u64>(behind) * num_rows + row] = kEnded;
    return;
  }
  const bool kept = step >= 0 && step < num_steps;
  const u64 place = static_cast<u64>(step) * num_rows + row;
  if (!sampled && !ranked && threadIdx.x >= 32) return;  // one warp is enough
  const u64 best_score = adjusted ? best_of_row(best + num_chunks, num_chunks) : best_logit;
  i32 drawn = entry_id(best_score);

  if (!key_is_finite(entry_key(best_logit))) {
    drawn = kNotFinite;
  } else if (sampled || ranked) {
    const uint4* row_maxima = reinterpret_cast<const uint4*>(maxima + static_cast<u64>(2 * row) * num_groups);
    const uint4* row_scores = reinterpret_cast<const uint4*>(scores) + static_cast<u64>(row) * ((vocab + 3) / 4);
    const Source of_logits = {reinterpret_cast<const uint4*>(row_logits[row]), row_maxima, vocab, num_groups,
                              score_of(entry_key(best_logit))};
    const Source of_scores = {row_scores, row_maxima + num_groups / 4, vocab, num_groups,
                              score_of(entry_key(best_score))};
    const Source& source = adjusted ? of_scores : of_logits;
    int listed = -1;
    if (sampled) {
      listed = list_head(source, max(head_rank(record.top_k, vocab), record.num_logprobs));
      drawn = draw(source, record, listed, stored + advance);
    }
    if (ranked && kept) {
      if (adjusted || listed < 0) listed = list_head(of_logits, record.num_logprobs);
      if (listed < 0) list_largest(of_logits, record.num_logprobs);
      if (threadIdx.x < 32)
        write_logprobs(out_logprobs + place * (1 + kMaxTop), out_top + place * kMaxTop, record.num_logprobs,
                       reinterpret_cast<const float*>(of_logits.words)[drawn], of_logits.largest,
                       log_mass(best, mass + row * num_chunks, num_chunks, of_logits.largest));
    }
  }

  if (threadIdx.x >= 32) return;
  const bool ends = ballot(stop == drawn) != 0 || stored + advance >= record.end;
  if (threadIdx.x != 0) return;
  if (kept) out_tokens[place] = drawn;
  token[slot] = ends ? kEnded : max(drawn, 0);
  length[slot] = stored + advance;
  if (record.penalty != 1 && drawn >= 0)
    seen[static_cast<u64>(slot) * ((vocab + 31) / 32) + drawn / 32] |= 1u << drawn % 32;
}
