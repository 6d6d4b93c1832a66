// A quad's pages in shared memory, as wgmma reads them: how they get there, and their products.
#pragma once

#ifdef TL_INT8
#include "quad_levels.cuh"
#else
#include "quad_halves.cuh"
#endif

struct QuadShared {
  QuadPage pages[kQuadSlots];

  DEVICE QuadPage& page(int n) { return pages[n % kQuadSlots]; }
};

// The nth page has landed, and nobody still reads the one before; `ask` asks for a later one.
template <class Ask>
DEVICE void begin_page(int n, Ask ask) {
  if (n == 0) cp_async_wait<kQuadSlots - 1>();
  else cp_async_wait<kQuadSlots - 2>();
  fence_for_wgmma();
  __syncthreads();
  if (n > 0) ask(n - 1 + kQuadSlots);
}
