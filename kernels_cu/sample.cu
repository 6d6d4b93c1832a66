// One token for each row of logits, on the device:
//
//   s = bias + penalty(l)      w = exp((s − max s) / T)      kept = top_k, then top_p, then min_p, of s in falling order
//   token = the first of kept whose running sum of w exceeds u(seed, choice, position) · Σ kept w;   T = 0: argmax s
//
// and log softmax(l) of the token and of the largest num_logprobs.  Falling order: larger score first, lower id first
// among equals.  Nothing is sorted but a short list, and nothing depends on the other rows: weights are integers in
// units of 2^-44, so every sum is exact in any order, and whichever way an element is found it is the same element.
//
//   row_logits    u64  [R]                address of the row's fp32 [V] logits, 16-byte aligned, readable up to a multiple of 4
//   row_slot      i32  [R]                −1: padding, skipped
//   base_length   i32  [R]                outputs go to step length[slot] − base_length[row]
//   records       Record [slots]          see below
//   bias_ids, bias_values  i32, f64 [slots][kMaxBias]
//   seen          u32  [slots][⌈V/32⌉]    bit i%32 of word i/32: token i was seen; the drawn token is added
//   scores        f32  [R][⌈V/4⌉·4]       scratch: s of rows with a penalty or a bias
//   best          u64  [R][2][chunks]     scratch: largest entry (select.cuh) of each chunk, of l and of s
//   maxima        u32  [R][2][groups]     scratch: largest key of every 32 elements, of l and of s; groups = 64·chunks
//   mass          u64  [R][chunks]        scratch: Σ exp(l − largest l of the chunk), in units of 2^-44
//   token, length i32  [slots]            token is written; length grows by `advance`
//   out_tokens    i32  [steps][R]         −1: the row's largest logit is not finite (token[slot] is then 0)
//   out_logprobs  f32  [steps][R][1+20]   the token's, then those of out_top
//   out_top       i32  [steps][R][20]
//
// V < 2^19.  Two launches: sample_scan, a block a (chunk of 2048, row), reads the logits once; sample_finish, a block
// a row, ends at once for argmax, else works on the few groups of 32 that can hold a kept element, and on the whole
// row only where those do not decide.  Bytes: 4·V a row, argmax; 8·V to 32·V more from L2 in the worst case.
// Scores are formed in fp64 and rounded to fp32 once; exp is good to 2^-23; log and what is around it is fp64.
#include "draw.cuh"
#include "select.cuh"

constexpr int kScanThreads = 256;
constexpr int kChunk = 2048;
constexpr int kPerThread = kChunk / kScanThreads;  // two vectors of 4, half a chunk apart
constexpr int kGroupsPerChunk = kChunk / kGroup;
constexpr int kMaxBias = 300;
constexpr int kMaxTop = 20;
constexpr int kHead = 512;  // groups that make the list where no top_k bounds it
constexpr float kLargest = 3.4028234663852886e38f;
static_assert(kPerThread == 8 && kChunk % kGroup == 0, "load_keys and write_group_maxima are written out for these");

// The sampling parameters of a slot, as the host packs them (kernels/sample.py).
struct Record {
  u64 seed;
  double top_p;                            // 1: off
  double penalty;                          // 1: off
  u64 min_weight;                          // ⌈min_p · 2^44⌉
  float inverse_temperature, inverse_low;  // log2(e) / T as a sum of two; 0 and 0: argmax
  i32 top_k;                               // 0: off; below V
  u32 choice;
  i32 num_logprobs;  // at most kMaxTop, and V
  i32 num_bias;
};
static_assert(sizeof(Record) == 56, "kernels/sample.py packs this");

DEVICE bool is_argmax(const Record& record) { return record.inverse_temperature == 0; }
DEVICE bool adjusts(const Record& record) { return record.penalty != 1 || record.num_bias > 0; }

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

DEVICE u64 chunk_best(u64* shared, const u32 (&keys)[kPerThread], i32 first) {
  u64 best = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const u64 entry = entry_of(keys[i], element_id(first, i));
    best = entry > best ? entry : best;
  }
  return block_max(shared, best);
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

DEVICE u64 chunk_mass(u64* shared, const u32 (&keys)[kPerThread], float largest) {
  u64 mass = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i)
    if (keys[i] != kNoKey) mass += weight_of(score_of(keys[i]), largest, kLog2E, kLog2ELow);
  return block_sum(shared, mass);
}

struct Adjustment {  // of one slot
  double penalty;
  const u32* seen;
  const i32* bias_ids;
  const double* bias_values;
  int num_bias;
};

DEVICE double penalised(const Adjustment& adjustment, float logit, i32 id) {
  const double score = logit;
  if (adjustment.penalty == 1 || !(adjustment.seen[id / 32] >> id % 32 & 1)) return score;
  return score > 0 ? score / adjustment.penalty : score * adjustment.penalty;
}

DEVICE float rounded(double score) {
  return fminf(fmaxf(static_cast<float>(score), -kLargest), kLargest);
}

// The first entry of an id adds all of that id's, in their order.
DEVICE void add_bias(float* chunk, const Adjustment& adjustment, const float* logits, i32 first, i32 vocab) {
  for (int entry = threadIdx.x; entry < adjustment.num_bias; entry += kScanThreads) {
    const i32 id = adjustment.bias_ids[entry];
    if (id < first || id >= min(first + kChunk, vocab)) continue;
    bool is_first = true;
    for (int i = 0; i < entry; ++i) is_first = is_first && adjustment.bias_ids[i] != id;
    if (!is_first) continue;
    double score = penalised(adjustment, logits[id], id);
    for (int i = entry; i < adjustment.num_bias; ++i)
      if (adjustment.bias_ids[i] == id) score += adjustment.bias_values[i];
    chunk[id - first] = rounded(score);
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

  const Adjustment adjustment = {record.penalty, seen + static_cast<u64>(slot) * ((vocab + 31) / 32),
                                 bias_ids + slot * kMaxBias, bias_values + slot * kMaxBias, record.num_bias};
  adjust(keys, adjusted, scores + static_cast<u64>(row) * ((vocab + 3) / 4 * 4), adjustment, logits, first, vocab);
  const u64 adjusted_best = chunk_best(warps, keys, first);
  if (threadIdx.x == 0) best[num_chunks] = adjusted_best;
  write_group_maxima(maxima + num_chunks * kGroupsPerChunk, keys);
}

// ---- sample_finish --------------------------------------------------------------------------------------------

struct Masses {
  u64 kept_by_top_k;
  u64 kept_by_min_p;  // of that
};

DEVICE u64 weight_of_key(u32 key, const Source& source, const Record& record) {
  return weight_of(score_of(key), source.largest, record.inverse_temperature, record.inverse_low);
}

struct Counts {  // elements for `descend`: every score once
  Source source;
  template <class Visit>
  DEVICE void for_each(Visit visit) const {
    for_each_word(source.words, source.vocab, [&](u32 bits, i32) { visit(key_of(bits), [] { return u64{1}; }); });
  }
};

struct Weights {  // every score with its weight
  Source source;
  const Record& record;
  template <class Visit>
  DEVICE void for_each(Visit visit) const {
    for_each_word(source.words, source.vocab, [&](u32 bits, i32) {
      const u32 key = key_of(bits);
      visit(key, [&] { return weight_of_key(key, source, record); });
    });
  }
};

struct IdsOfKey {  // the ids of one key, the lowest first: id = ~key >> 13
  Source source;
  u32 wanted;
  template <class Visit>
  DEVICE void for_each(Visit visit) const {
    for_each_word(source.words, source.vocab, [&](u32 bits, i32 id) {
      if (key_of(bits) == wanted) visit(~(static_cast<u32>(id) << 13), [] { return u64{1}; });
    });
  }
};

// By two passes over the row, after four more where a top_k decides that the list is too short for.
DEVICE Masses masses_of_row(SelectShared& shared, const Source& source, const Record& record) {
  Crossing last = {kNoKey, 0};
  if (record.top_k) last = descend(shared, Counts{source}, record.top_k - 1, 3);
  u64 all = 0, likely = 0;
  const auto add = [&](u64 weight, u64 times) {
    all += times * weight;
    if (weight >= record.min_weight) likely += times * weight;
  };
  for_each_word(source.words, source.vocab, [&](u32 bits, i32) {
    const u32 key = key_of(bits);
    if (key > last.key) add(weight_of_key(key, source, record), 1);
  });
  if (record.top_k && threadIdx.x == 0) add(weight_of_key(last.key, source, record), record.top_k - last.above);
  all = block_sum(shared.warp_sums, all);
  return {all, block_sum(shared.warp_sums, likely)};
}

// Of the first `count` entries of the list, whose running sums it leaves in shared.running.
DEVICE Masses masses_of_list(SelectShared& shared, int count, const Source& source, const Record& record) {
  const int first = kListPerThread * threadIdx.x;
  u64 weights[kListPerThread], all = 0, likely = 0;
#pragma unroll
  for (int i = 0; i < kListPerThread; ++i) {
    weights[i] = first + i < count ? weight_of_key(entry_key(shared.list[first + i]), source, record) : 0;
    all += weights[i];
    if (weights[i] >= record.min_weight) likely += weights[i];
  }
  u64 through = block_sum_before(shared.warp_sums, all);
#pragma unroll
  for (int i = 0; i < kListPerThread; ++i) shared.running[first + i] = through += weights[i];
  __syncthreads();
  return {count > 0 ? shared.running[count - 1] : 0, block_sum(shared.warp_sums, likely)};
}

// Where a running sum of weights, in falling order, first exceeds a target: from the list as far as that goes.
struct Order {
  SelectShared& shared;
  const Source& source;
  const Record& record;
  int listed;       // entries of the list with running sums
  u64 listed_mass;  // their sum; 0 once a descent has taken their memory

  // The running sum, that element's weight included.
  DEVICE u64 mass_through(u64 target) {
    if (target < listed_mass) return shared.running[find_in_list(shared, listed, target)];
    const Crossing found = descend_weights(target);
    const u64 weight = weight_of_key(found.key, source, record);
    return found.above + ((target - found.above) / weight + 1) * weight;
  }

  DEVICE i32 id_at(u64 target) {
    if (target < listed_mass) return entry_id(shared.list[find_in_list(shared, listed, target)]);
    const Crossing found = descend_weights(target);
    const u64 equals_before = (target - found.above) / weight_of_key(found.key, source, record);
    return ~descend(shared, IdsOfKey{source, found.key}, equals_before, 2).key >> 13;
  }

  DEVICE Crossing descend_weights(u64 target) {
    listed_mass = 0;
    return descend(shared, Weights{source, record}, target, 3);
  }
};

// How many groups to list: all that top_k needs, or the whole row, or what is likely to decide.
DEVICE int head_rank(i32 top_k, i32 vocab) {
  if (top_k > 0 && top_k <= kListCapacity) return top_k;
  return vocab <= kListCapacity ? vocab : min(kHead, vocab / kGroup / 2);
}

// listed: entries of the sorted list, the head of the falling order; −1: none.
DEVICE i32 draw(SelectShared& shared, const Source& source, const Record& record, int listed, u32 position) {
  const bool list_decides = record.top_k ? record.top_k <= listed : source.vocab == listed;
  if (list_decides && record.top_k) listed = record.top_k;
  Masses masses = {};
  if (!list_decides) masses = masses_of_row(shared, source, record);
  const Masses in_list = masses_of_list(shared, listed, source, record);
  if (list_decides) masses = in_list;

  Order order = {shared, source, record, listed, in_list.kept_by_top_k};
  u64 kept = masses.kept_by_min_p;
  if (record.top_p < 1) {  // keeps what the likelier ones leave below this
    const double limit = ceil(record.top_p * static_cast<double>(masses.kept_by_top_k));
    const u64 last = limit < static_cast<double>(masses.kept_by_top_k) ? static_cast<u64>(limit) : masses.kept_by_top_k;
    const u64 kept_by_top_p = order.mass_through(last > 0 ? last - 1 : 0);
    kept = kept_by_top_p < kept ? kept_by_top_p : kept;
  }
  return order.id_at(scale_mass(noise(record.seed, record.choice, position), kept));
}

// ---- sample_finish: log probabilities ---------------------------------------------------------------------------

// By one warp: log Σ exp(l − largest) from the chunks' sums.
DEVICE double log_mass(const u64* best, const u64* mass, int num_chunks, double largest) {
  u64 sum = 0;
  for (int chunk = threadIdx.x % 32; chunk < num_chunks; chunk += 32)
    sum += static_cast<u64>(static_cast<double>(mass[chunk]) * exp(score_of(entry_key(best[chunk])) - largest));
  return log(static_cast<double>(warp_sum(sum)) * kWeightUnit);
}

// By one warp: entry 0 is the drawn token's, the others those of the list.
DEVICE void write_logprobs(const SelectShared& shared, int count, float drawn, double largest, double log_sum,
                           float* out_logprobs, i32* out_top) {
  const int place = threadIdx.x % 32;
  if (place > count) return;
  const float logit = place ? score_of(entry_key(shared.list[place - 1])) : drawn;
  out_logprobs[place] = fmaxf(static_cast<float>(logit - largest - log_sum), -kLargest);
  if (place) out_top[place - 1] = entry_id(shared.list[place - 1]);
}

// By every warp for itself.
DEVICE u64 best_of_row(const u64* best, int num_chunks) {
  u64 largest = 0;
  for (int chunk = threadIdx.x % 32; chunk < num_chunks; chunk += 32)
    largest = best[chunk] > largest ? best[chunk] : largest;
  return warp_max(largest);
}

extern "C" __global__ void __launch_bounds__(kSelectThreads)
    sample_finish(const u64* row_logits, const i32* row_slot, const i32* base_length, const Record* records,
                  const float* scores, const u64* best, const u32* maxima, const u64* mass, u32* seen, i32* token,
                  i32* length, i32* out_tokens, float* out_logprobs, i32* out_top, i32 vocab, i32 num_chunks,
                  i32 num_steps, i32 advance) {
  __shared__ SelectShared shared;
  dependency_wait();
  dependency_launch();
  const int row = blockIdx.x, num_rows = gridDim.x;
  const i32 slot = row_slot[row];
  if (slot < 0) return;
  const Record record = records[slot];
  const bool sampled = !is_argmax(record), adjusted = adjusts(record), ranked = record.num_logprobs > 0;
  if (!sampled && !ranked && threadIdx.x >= 32) return;  // one warp is enough
  const i32 stored = length[slot], step = stored - base_length[row];
  const bool kept = step >= 0 && step < num_steps;
  const u64 place = static_cast<u64>(step) * num_rows + row;
  best += 2 * row * num_chunks;
  const u64 best_logit = best_of_row(best, num_chunks);
  const u64 best_score = adjusted ? best_of_row(best + num_chunks, num_chunks) : best_logit;
  i32 drawn = entry_id(best_score);

  if (!key_is_finite(entry_key(best_logit))) {
    drawn = -1;
  } else if (sampled || ranked) {
    const i32 num_groups = num_chunks * kGroupsPerChunk;
    maxima += static_cast<u64>(2 * row) * num_groups;
    const Source logits = {reinterpret_cast<const uint4*>(row_logits[row]), reinterpret_cast<const uint4*>(maxima),
                           vocab, num_groups, score_of(entry_key(best_logit))};
    int listed = -1;
    if (sampled) {
      Source source = logits;
      if (adjusted)
        source = {reinterpret_cast<const uint4*>(scores) + static_cast<u64>(row) * ((vocab + 3) / 4),
                  reinterpret_cast<const uint4*>(maxima + num_groups), vocab, num_groups,
                  score_of(entry_key(best_score))};
      listed = list_head(shared, source, max(head_rank(record.top_k, vocab), record.num_logprobs));
      drawn = draw(shared, source, record, listed, stored + advance);
    }
    if (ranked && kept) {
      if (!sampled || adjusted) listed = list_head(shared, logits, record.num_logprobs);
      if (listed < 0) list_largest(shared, logits, record.num_logprobs);
      const double log_sum = log_mass(best, mass + row * num_chunks, num_chunks, logits.largest);
      if (threadIdx.x < 32)
        write_logprobs(shared, record.num_logprobs, reinterpret_cast<const float*>(logits.words)[drawn],
                       logits.largest, log_sum, out_logprobs + place * (1 + kMaxTop), out_top + place * kMaxTop);
    }
  }

  if (threadIdx.x != 0) return;
  if (kept) out_tokens[place] = drawn;
  token[slot] = max(drawn, 0);
  length[slot] = stored + advance;
  if (record.penalty != 1 && drawn >= 0) seen[static_cast<u64>(slot) * ((vocab + 31) / 32) + drawn / 32] |= 1u << drawn % 32;
}
