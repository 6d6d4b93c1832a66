// Fibers: several stacks on one CPU thread, each going on where it left off.
//
// prepare() makes a context that starts a function on a stack of its own; switch_to() leaves one for another.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulator {

#ifdef __x86_64__
using Context = void*;  // a stack pointer; what the caller of a function may count on lies on the stack
extern "C" __attribute__((visibility("hidden"))) void tl_switch_stack(void** save, void* resume);
asm(R"(
  .text
  .hidden tl_switch_stack
  .type tl_switch_stack, @function
tl_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size tl_switch_stack, . - tl_switch_stack
)");

inline void switch_to(Context& from, Context& to) { tl_switch_stack(&from, to); }

inline void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t{15};
  auto* words = reinterpret_cast<void**>(top) - 2;  // entry sees the stack as after a call: 16k + 8
  words[1] = nullptr;
  words[0] = reinterpret_cast<void*>(entry);
  context = words - 6;  // six registers, whatever they hold
}
#else
using Context = ucontext_t;
inline void switch_to(Context& from, Context& to) { swapcontext(&from, &to); }

inline void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#endif

}  // namespace emulator
