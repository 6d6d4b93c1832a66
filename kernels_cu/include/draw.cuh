// What a draw is made of: exact weights, and noise that is a function of (seed, choice, position).
//
// A weight is an integer in units of 2^-44, 1.0 at most: the sum over 2^19 elements fits 64 bits, and is the same in
// any order.  No fused or reordered operation but those written here, so every device computes the same bits.
#pragma once

#include "ptx.cuh"

constexpr int kWeightBits = 44;
constexpr double kWeightUnit = 5.684341886080802e-14;  // 2^-44
constexpr float kLog2E = 1.44269502f, kLog2ELow = 1.92596303e-8f;

// 2^((score − largest) · (scale + scale_low)) in units of 2^-44, rounded down.  score ≤ largest.
//
// The exponent is kept to about 48 bits, so that the weight is as good as its 24.
DEVICE u64 weight_of(float score, float largest, float scale, float scale_low) {
  const float difference = score - largest;
  const float part = difference - score;  // what of −largest got into the difference
  const float lost = (score - (difference - part)) + (-largest - part);
  const float exponent = difference * scale;
  if (!(exponent > -46.0f)) return 0;  // also where a product of infinities is no number
  const float whole = rintf(exponent);
  const float fraction =
      (exponent - whole) + (fmaf(difference, scale, -exponent) + fmaf(difference, scale_low, lost * scale));
  float power = 1.54614478e-4f;  // 2^fraction on [−1/2, 1/2] by Chebyshev's nodes: error below 2^-27 before rounding
  power = fmaf(power, fraction, 1.33908668e-3f);
  power = fmaf(power, fraction, 9.61805694e-3f);
  power = fmaf(power, fraction, 5.55035695e-2f);
  power = fmaf(power, fraction, 2.40226507e-1f);
  power = fmaf(power, fraction, 6.93147182e-1f);
  power = fmaf(power, fraction, 1.0f);
  const u64 mantissa = static_cast<u32>(power * 16777216.0f);  // 24 bits, or 25: exact
  const int shift = kWeightBits - 24 + static_cast<int>(whole);
  return shift >= 0 ? mantissa << shift : mantissa >> -shift;
}

// ⌊value · mass / 2^53⌋: value a number in [0, 1) in units of 2^-53, mass below 2^63.
DEVICE u64 scale_mass(u64 value, u64 mass) {
  const u64 value_low = value & 0xffffffffu, value_high = value >> 32;
  const u64 mass_low = mass & 0xffffffffu, mass_high = mass >> 32;
  const u64 middle = value_high * mass_low + (value_low * mass_low >> 32);
  const u64 carried = value_low * mass_high + (middle & 0xffffffffu);
  const u64 high = value_high * mass_high + (middle >> 32) + (carried >> 32);
  return high << 11 | (carried & 0xffffffffu) >> 21;
}

// engine/noise.py: Philox4x32-10 of key = seed, counter = (position, choice); 53 bits.
DEVICE u64 noise(u64 seed, u32 choice, u32 position) {
  u32 c0 = position, c1 = 0, c2 = choice, c3 = 0;
  u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const u64 product0 = static_cast<u64>(0xd2511f53u) * c0, product1 = static_cast<u64>(0xcd9e8d57u) * c2;
    c0 = static_cast<u32>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<u32>(product1);
    c2 = static_cast<u32>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<u32>(product0);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return static_cast<u64>(c0 >> 5) << 26 | c1 >> 6;
}
