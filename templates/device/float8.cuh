// 8-bit floats: scales, codes, and the rotation before them. What is computed, bit for bit, stands in cuflash/cpu_quantize.py.
#pragma once
#include "device/ptx.cuh"

DEVICE bool is_finite(float x) { return fabsf(x) <= 0x1.fffffep127f; }

// One code in integer arithmetic, for targets without an instruction for it: see Format.encode in cuflash/fp8.py.
template <bool kE5m2>
DEVICE u32 encode_float8(float x) {
    constexpr int kMantissa = kE5m2 ? 2 : 3, kBias = kE5m2 ? 15 : 7, kDrop = 23 - kMantissa;
    constexpr float kLargest = kE5m2 ? 57344.f : 448.f, kNormal = kE5m2 ? 0x1p-14f : 0x1p-6f;
    if (x != x) return 0x7f;
    const float magnitude = min_f32(fabsf(x), kLargest);
    const u32 bits = (u32)float_bits(magnitude), sign = (u32)float_bits(x) >> 24 & 0x80;
    constexpr float kUnits = kNormal * (1 << kDrop);   // its last place is the smallest code: what is added to it is rounded there
    if (magnitude < kNormal) return sign | ((u32)float_bits(magnitude + kUnits) - (u32)float_bits(kUnits));
    const u32 rounded = (bits + (bits >> kDrop & 1) + (1 << (kDrop - 1)) - 1) >> kDrop;
    return sign | (rounded - ((127 - kBias) << kMantissa));
}

// Four values as the bytes of a word, the first one lowest. kHardware: the target converts by itself.
template <bool kHardware, bool kE5m2>
DEVICE u32 pack_float8(float a, float b, float c, float d) {
    if constexpr (kHardware) return pack_float8x4<kE5m2>(a, b, c, d);
    return encode_float8<kE5m2>(a) | encode_float8<kE5m2>(b) << 8 | encode_float8<kE5m2>(c) << 16 | encode_float8<kE5m2>(d) << 24;
}

// The number of one code. e5m2 is the upper half of a float16; of e4m3, exponent and mantissa are read as those of a float, whose bias is
// larger by 120.
template <bool kE5m2>
DEVICE float decode_float8(u32 code) {
    if constexpr (kE5m2) {
        float number, zero;
        unpack_pair<false>(code << 8, number, zero);
        return number;
    }
    const float magnitude = (code & 0x7f) == 0x7f ? bits_float(0x7fc00000u) : bits_float((code & 0x7f) << 20) * 0x1p120f;
    return code & 0x80 ? -magnitude : magnitude;
}

// Division by a scale, rounded to nearest even. Markstein: with the nearest reciprocal, one correction of the product is enough.
struct Divisor {
    float scale, inverse;
    DEVICE explicit Divisor(float s) : scale(s), inverse(1.f / s) {}
    DEVICE float divide(float x) const {
        const float quotient = mul_f32(x, inverse);
        return fma_f32(fma_f32(scale, quotient, -x), -inverse, quotient);
    }
};

// The scale of a tile with this largest magnitude, not 0. Below kTinyScale the remainder of a division would be subnormal, and not exact:
// then values and scale are taken kLift times as large.
DEVICE float scale_of(float largest, bool e5m2, float smallest) { return max_f32(largest / (e5m2 ? 57344.f : 448.f), smallest); }
constexpr float kSmallestScale = 0x1p-126f, kSmallestRotated = 0x1p-122f;   // no unit is below 2^-4
constexpr float kTinyScale = 0x1p-80f, kLift = 0x1p64f;

// The largest magnitude of some values, without NaN and infinities; these become NaN.
template <int kCount>
DEVICE float largest_finite(float (&x)[kCount]) {
    float several[4] = {}, largest;   // side by side, since each waits for the one before
    #pragma unroll
    for (int i = 0; i < kCount; i++) several[i % 4] = max_f32(several[i % 4], fabsf(x[i]));   // a NaN loses
    largest = max_f32(max_f32(several[0], several[1]), max_f32(several[2], several[3]));
    if (is_finite(largest)) return largest;
    largest = 0.f;
    #pragma unroll
    for (int i = 0; i < kCount; i++) {
        if (!is_finite(x[i])) x[i] = bits_float(0x7fc00000u);
        largest = max_f32(largest, fabsf(x[i]));
    }
    return largest;
}

// ---- the rotation

struct SignBits { u32 word[8]; };   // bit c: column c is negated

// The size of the Hadamard block that a column is in; 1 beyond the head dim.
DEVICE constexpr int hadamard_block(int head_dim, int column) {
    int size = 256;
    while (size > 1 && column >= head_dim / size * size) size /= 2;
    return size;
}
DEVICE constexpr float hadamard_norm(int size) {
    return size == 256 ? 0.0625f : size == 128 ? 0.088388347648318447f : size == 64 ? 0.125f : size == 32 ? 0.17677669529663689f
         : size == 16 ? 0.25f : size == 8 ? 0.35355339059327379f : size == 4 ? 0.5f : size == 2 ? 0.70710678118654757f : 1.f;
}
// The norm of the first, largest block, which is left to the scale.
DEVICE constexpr float hadamard_unit(int head_dim) { return hadamard_norm(hadamard_block(head_dim, 0)); }

// Sums and differences of the first kColumns of a lane's columns, which are whole blocks; in the end, of blocks of kBlock.
template <int kColumns, int kBlock = kColumns, int kDistance = 1, int kCount>
DEVICE void butterflies(float (&x)[kCount]) {
    if constexpr (2 * kDistance <= kBlock) {
        #pragma unroll
        for (int pair = 0; pair < kColumns / (2 * kDistance) * kDistance; pair++) {
            const int i = pair + pair / kDistance * kDistance;
            const float a = x[i], b = x[i + kDistance];
            x[i] = a + b;
            x[i + kDistance] = a - b;
        }
        butterflies<kColumns, kBlock, 2 * kDistance>(x);
    }
}

// Which columns the lanes of a row have: two halves of kLaneColumns / 2 each, counted in such halves from the row's beginning. In a block of so many
// parts as `parts`, the first half of part p is number p ^ 2 p; the second one differs by one bit: the lowest, and after every exchange the next. So
// both lanes of an exchange send their second half, which is the other's partner, and keep the first one.
template <int kHeadDim, int kLaneColumns>
struct Halves {
    int first, second, second_rotated;
    DEVICE explicit Halves(int part) {
        const int parts = max_int(1, hadamard_block(kHeadDim, part * kLaneColumns) / kLaneColumns), inside = part & (parts - 1);
        first = 2 * (part - inside) + (inside ^ 2 * inside);
        second = first ^ 1;
        second_rotated = first ^ parts;
    }
};

// The sum of a lane's own value and another one, and the lower column's less the higher one's. The own column gets that which belongs there, and
// `other_column` the rest; `sign` is negative where the own column is the higher one.
DEVICE void sum_and_difference(float& own, float& other_column, float other, float sign) {
    const float before = own;
    own = fma_f32(before, sign, other);
    other_column = fma_f32(other, -sign, before);
}

// Rotates rows whose signs are applied; the result is in units of hadamard_unit. Each lane has kLaneColumns columns of one row, a power of two, those
// of its Halves (kCount of them; others do not exist); its warp has kParts parts of each row, the next part of which is kStep lanes on.
template <int kHeadDim, int kLaneColumns, int kParts, int kStep, int kCount>
DEVICE void rotate(float (&x)[kCount], int part) {
    constexpr int kWhole = kHeadDim / kLaneColumns, kRest = kHeadDim % kLaneColumns, kHalf = kLaneColumns / 2;
    if (kRest > 0 && part == kWhole) {
        butterflies<kRest>(x);
        #pragma unroll
        for (int i = 0; i < kRest; i++) x[i] = mul_f32(x[i], hadamard_norm(hadamard_block(kRest, i)) / hadamard_unit(kHeadDim));
    }
    if constexpr (kWhole > 0) {
        const int first = Halves<kHeadDim, kLaneColumns>(part).first;
        if (kRest == 0 || part != kWhole) {
            butterflies<kLaneColumns, kHalf>(x);
            #pragma unroll
            for (int i = 0; i < kHalf; i++) sum_and_difference(x[i], x[kHalf + i], x[kHalf + i], first & 1 ? -1.f : 1.f);
        }
        #pragma unroll
        for (int distance = 1; distance < kParts; distance *= 2) {
            const int taking = kWhole / (2 * distance) * (2 * distance);   // parts, in blocks larger than the distance
            if (taking == 0) break;
            const float sign = first & 2 * distance ? -1.f : 1.f;
            #pragma unroll
            for (int i = 0; i < kHalf; i++) {
                const float other = shuffle_xor(x[kHalf + i], distance * kStep);
                if (taking == kParts || part < taking) sum_and_difference(x[i], x[kHalf + i], other, sign);
            }
        }
        if constexpr (hadamard_block(kHeadDim, 0) != kHeadDim) {
            float norm = 1.f;
            #pragma unroll
            for (int size = kLaneColumns; size <= 256; size *= 2)
                if (part < kHeadDim / size * (size / kLaneColumns)) norm = hadamard_norm(size) / hadamard_unit(kHeadDim);
            #pragma unroll
            for (int i = 0; i < kCount; i++) x[i] = mul_f32(x[i], norm);
        }
    }
}

struct alignas(16) Float4 { float value[4]; };
