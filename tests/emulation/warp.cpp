// Warp-wide instructions, by their definition in the PTX ISA manual (sections of version 8.8 named at each), and element conversions.
#include "state.h"

namespace emulation {

namespace {

using Lanes = Thread*;
template <class Operands>
Operands& of(Thread& lane) { return *static_cast<Operands*>(lane.operands); }

// 9.7.14.5.15: lanes 8m .. 8m+7 give the addresses of the rows of matrix m; lane l gets elements 2(l%4) and 2(l%4)+1 of row l/4,
// or with .trans of column l/4.
void load_matrix(Lanes lanes) {
    machine.counts["ldmatrix"]++;
    for (int m = 0; m < 4; m++) {
        uint32_t rows[8];
        for (int i = 0; i < 8; i++) {
            machine.current = &lanes[8 * m + i];
            rows[i] = of<LoadMatrix>(lanes[8 * m + i]).address;
            if (rows[i] % 16) fault("misaligned shared access", "ldmatrix row at %u", rows[i]);
        }
        count_matrix_conflicts(rows);
        uint16_t matrix[8][8];
        for (int row = 0; row < 8; row++)
            for (int word = 0; word < 4; word++) {
                machine.current = &lanes[8 * m + row];
                const uint32_t value = checked_word(rows[row] + 4 * word, 4, true);
                memcpy(&matrix[row][2 * word], &value, 4);
            }
        for (int lane = 0; lane < kWarpSize; lane++) {
            LoadMatrix& o = of<LoadMatrix>(lanes[lane]);
            const int major = lane / 4, minor = 2 * (lane % 4);
            const uint16_t low = o.transposed ? matrix[minor][major] : matrix[major][minor];
            const uint16_t high = o.transposed ? matrix[minor + 1][major] : matrix[major][minor + 1];
            o.r[m] = low | (uint32_t)high << 16;
        }
    }
}

bool is_float8(Element element) { return element == Element::e4m3 || element == Element::e5m2; }

// The elements of a register.
void unpack(float* to, uint32_t word, Element element) {
    if (is_float8(element)) {
        for (int i = 0; i < 4; i++) to[i] = from_float8(word >> 8 * i & 0xff, element == Element::e5m2);
    } else {
        for (int i = 0; i < 2; i++) to[i] = from_element(word >> 16 * i & 0xffff, element == Element::bf16);
    }
}

// What tensor cores make of 8-bit products and the sum before them, as far as was measured (on Hopper): all are aligned to the largest
// and lose what lies kFraction bits below it; the sum of what is left is exact.
constexpr int kFraction = 13;
float truncating_sum(float sum, const float* products, int count) {
    float largest = fabsf(sum);
    for (int i = 0; i < count; i++) largest = fmaxf(largest, fabsf(products[i]));
    double total = sum;
    for (int i = 0; i < count; i++) total += products[i];
    if (largest == 0.f || !std::isfinite(total)) return (float)total;
    const int unit = ilogbf(largest) - kFraction;
    total = trunc(ldexp(sum, -unit));
    for (int i = 0; i < count; i++) total += trunc(ldexp(products[i], -unit));
    return (float)ldexp(total, unit);
}

// 9.7.14.5.8 and 9.7.14.5.10: fragments of mma.m16n8k16 and, of 8-bit elements, m16n8k32: a register has the same place among the columns of A
// and the rows of B. Products of 16-bit floats are exact in fp32; their sum is rounded at every addition here, while the order on a GPU is not
// specified.
void multiply(Lanes lanes) {
    machine.counts["mma"]++;
    const Elements elements = of<Multiply>(lanes[0]).elements;
    const bool float8 = is_float8(elements.a);   // and so those of b
    const int each = float8 ? 4 : 2, depth = 8 * each;   // elements of a register; of a row of A
    float a[16][32], b[8][32], d[16][8];   // b by columns
    for (int lane = 0; lane < kWarpSize; lane++) {
        const Multiply& o = of<Multiply>(lanes[lane]);
        const int group = lane / 4, first = each * (lane % 4);
        for (int i = 0; i < 4; i++) unpack(&a[group + 8 * (i & 1)][first + 4 * each * (i >> 1)], o.a[i], elements.a);
        for (int i = 0; i < 2; i++) unpack(&b[group][first + 4 * each * i], o.b[i], elements.b);
        for (int i = 0; i < 4; i++) d[group + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)] = o.first ? 0.f : o.d[i];
    }
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 8; column++) {
            float products[32];
            for (int k = 0; k < depth; k++) products[k] = a[row][k] * b[column][k];
            if (float8) d[row][column] = truncating_sum(d[row][column], products, depth);
            else for (int k = 0; k < depth; k++) d[row][column] += products[k];
        }
    for (int lane = 0; lane < kWarpSize; lane++)
        for (int i = 0; i < 4; i++) of<Multiply>(lanes[lane]).d[i] = d[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)];
}

void vote(Lanes lanes) {
    bool any = false;
    for (int i = 0; i < kWarpSize; i++) any |= of<Vote>(lanes[i]).predicate;
    for (int i = 0; i < kWarpSize; i++) of<Vote>(lanes[i]).result = any;
    machine.counts["votes"]++;
    machine.counts["votes that were true"] += any;
}

void shuffle(Lanes lanes) {
    machine.counts["shuffles"]++;
    for (int i = 0; i < kWarpSize; i++) {
        Shuffle& o = of<Shuffle>(lanes[i]);
        o.result = of<Shuffle>(lanes[i ^ o.mask]).value;
    }
}

float from_half(uint16_t h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    float magnitude;
    if (exponent == 31) magnitude = mantissa ? NAN : INFINITY;
    else if (exponent == 0) magnitude = ldexpf((float)mantissa, -24);
    else magnitude = ldexpf((float)(1024 + mantissa), exponent - 25);
    return h >> 15 ? -magnitude : magnitude;
}

struct HalfTable {
    float value[1 << 16];
    HalfTable() { for (int i = 0; i < 1 << 16; i++) value[i] = from_half((uint16_t)i); }
};

uint16_t to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint16_t sign = bits >> 16 & 0x8000;
    const float magnitude = fabsf(f);
    if (f != f) return 0x7fff;
    if (magnitude >= 65520.f) return sign | 0x7c00;
    const int unit = magnitude < 0x1p-14f ? -24 : ilogbf(magnitude) - 10;   // the exponent of the last place
    const int rounded = (int)rintf(ldexpf(magnitude, -unit));
    return sign | (uint16_t)(((unit + 24) << 10) + rounded);
}

}  // namespace

float from_element(uint16_t bits, bool bf16) {
    static const HalfTable half;
    if (!bf16) return half.value[bits];
    const uint32_t wide = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &wide, 4);
    return f;
}

uint16_t to_element(float value, bool bf16) {
    if (!bf16) return to_half(value);
    if (value != value) return 0x7fff;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint8_t to_float8(float value, bool e5m2) {
    const int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
    if (value != value) return 0x7f;
    const float magnitude = fminf(fabsf(value), e5m2 ? 57344.f : 448.f);
    const int exponent = magnitude < ldexpf(1.f, 1 - bias) ? 1 - bias : ilogbf(magnitude);
    const int units = (int)rintf(ldexpf(magnitude, mantissa - exponent));   // of the last place
    return (uint8_t)((std::signbit(value) ? 0x80 : 0) | (((exponent + bias - 1) << mantissa) + units));
}

float from_float8(uint8_t code, bool e5m2) {
    const int bits = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;   // of the mantissa
    const int exponent = (code & 0x7f) >> bits, mantissa = code & ((1 << bits) - 1);
    float magnitude = ldexpf((float)(exponent ? (1 << bits) + mantissa : mantissa), (exponent ? exponent : 1) - bias - bits);
    if (e5m2 && exponent == 31) magnitude = mantissa ? NAN : INFINITY;
    if (!e5m2 && (code & 0x7f) == 0x7f) magnitude = NAN;
    return code >> 7 ? -magnitude : magnitude;
}

void execute(Wait wait, Thread* lanes) {
    switch (wait) {
        case Wait::load_matrix: return load_matrix(lanes);
        case Wait::multiply: return multiply(lanes);
        case Wait::vote: return vote(lanes);
        case Wait::shuffle: return shuffle(lanes);
        case Wait::warp_barrier: machine.warps[warp_of(lanes[0])].epoch++; return;
        case Wait::nothing: case Wait::block_barrier: return;
    }
}

void load_matrix_x4(uint32_t (&r)[4], uint32_t address, bool transposed) {
    LoadMatrix o{r, address, transposed};
    arrive(Wait::load_matrix, &o);
}

void multiply(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, Elements elements, bool first) {
    Multiply o{d, a, {b0, b1}, elements, first};
    arrive(Wait::multiply, &o);
}

bool vote_any(bool predicate) {
    Vote o{predicate, false};
    arrive(Wait::vote, &o);
    return o.result;
}

float shuffle_xor(float value, int mask) {
    Shuffle o{value, mask, 0.f};
    arrive(Wait::shuffle, &o);
    return o.result;
}

}  // namespace emulation
