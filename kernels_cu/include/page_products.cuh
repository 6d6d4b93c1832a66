// The products of decode_attention, scores and mix, of what a page stores (stored.cuh).
//
//   fp16       halves of q and K; halves of weights and V; fp32 sums, which a tensor core adds 16 at a time
//   TL_INT8    levels of q and K; levels of weights and V; sums are exact, in whatever order
#pragma once

#ifdef TL_INT8
#include "level_products.cuh"
#else
#include "half_products.cuh"
#endif

// Which half of the page a step of the mix is of.
DEVICE constexpr int half_of(int s) { return s * kTokenPieces / kMixSteps; }
