// Vectors of examples, elementary functions of them, and activations. The constants in front of this text are written by
// native_source.py; perceptron.cpp comes behind it.

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

// ---- Vectors: LANES examples each. Blocks of BLOCK units × GROUP vectors, and of ROWS × COLUMNS dot products, fill the registers.
#if defined(__AVX512F__)
constexpr int BYTES = 64, BLOCK = 6, GROUP = 4, ROWS = 5, COLUMNS = 5;
#elif defined(__AVX__)
constexpr int BYTES = 32, BLOCK = 4, GROUP = 3, ROWS = 3, COLUMNS = 4;
#else
constexpr int BYTES = 16, BLOCK = 4, GROUP = 3, ROWS = 3, COLUMNS = 4;
#endif
constexpr int LANES = BYTES / sizeof(real);
typedef real V __attribute__((vector_size(BYTES)));
typedef whole I __attribute__((vector_size(BYTES)));

constexpr int widest() { int w = 0; for (int l = 1; l <= DEPTH; ++l) w = WIDTH[l] > w ? WIDTH[l] : w; return w; }
constexpr int rows_of(int l) { int n = 0; for (int i = 0; i < l; ++i) n += WIDTH[i + 1]; return n; }
constexpr bool stored(int l) { return ACTIVATION[l] > SIGMOID; }  // derivatives that the value does not give
constexpr int stored_of(int l) { int n = 0; for (int i = 0; i < l; ++i) n += stored(i) ? WIDTH[i + 1] : 0; return n; }
constexpr int HELD = rows_of(DEPTH) + stored_of(DEPTH) + 2 * widest();
// A tile's vectors: at most 32, fewer where its values would not stay in the second-level cache.
constexpr int fitting = 512 * 1024 / (BYTES * (HELD + WIDTH[0]));
constexpr int TILE = fitting > 32 ? 32 : fitting < 4 ? 4 : fitting;
constexpr long STRIDE = (TILE + 1) * LANES;  // from unit to unit; odd in cache lines, so that units do not share cache sets

INLINE V splat(real x) { return x - V{}; }
INLINE V load(const real* x) { return *reinterpret_cast<const V*>(x); }
INLINE void store(real* x, V v) { *reinterpret_cast<V*>(x) = v; }
template <class A, class B> INLINE A bits(B b) { A a; memcpy(&a, &b, sizeof(A)); return a; }
INLINE V low(V x, real top) { V t = splat(top); return x > t ? t : x; }  // both keep NaN
INLINE V high(V x, real bottom) { V b = splat(bottom); return x < b ? b : x; }
INLINE V positive(V x) { return x < 0 ? -x : x; }

// Sums along lanes, by halves.
typedef real V2 __attribute__((vector_size(2 * sizeof(real))));
typedef real V4 __attribute__((vector_size(4 * sizeof(real))));
typedef real V8 __attribute__((vector_size(8 * sizeof(real))));
typedef real V16 __attribute__((vector_size(16 * sizeof(real))));
#if defined(__clang__) || __GNUC__ >= 12
INLINE real total(V2 v) { return v[0] + v[1]; }
INLINE real total(V4 v) { return total(__builtin_shufflevector(v, v, 0, 1) + __builtin_shufflevector(v, v, 2, 3)); }
INLINE real total(V8 v) {
  return total(__builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7));
}
INLINE real total(V16 v) {
  return total(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
}
#else
INLINE real total(V v) {
  real sums[LANES];
  memcpy(sums, &v, BYTES);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}
#endif
typedef double Exact __attribute__((vector_size(LANES * sizeof(double))));
INLINE Exact exact(V v) { return __builtin_convertvector(v, Exact); }
INLINE double exact_total(const Exact& v) {
  double sum = 0;
  UNROLL for (int i = 0; i < LANES; ++i) sum += v[i];
  return sum;
}
INLINE V inverse(V x) {
#ifdef __AVX512F__
  if constexpr (sizeof(real) == 4) {  // 14 bits, then one step of Newton's
    typedef float Floats __attribute__((vector_size(64)));
    V guess = bits<V>(Floats(__builtin_ia32_rcp14ps512_mask(bits<Floats>(x), bits<Floats>(x), -1)));
    return guess + guess * (1 - x * guess);
  }
#endif
  return 1 / x;
}

// ---- Functions. 2^y = 2^n (1 + f·poly(f)) with n the nearest whole number.
constexpr real ROUND = sizeof(real) == 4 ? 12582912.0 : 6755399441055744.0;  // 1.5·2^23, 1.5·2^52
constexpr int SHIFT = sizeof(real) == 4 ? 23 : 52;
template <int COUNT> INLINE V poly(const real (&c)[COUNT], V x) {
  V sum = splat(c[COUNT - 1]);
  UNROLL for (int i = COUNT - 2; i >= 0; --i) sum = sum * x + c[i];
  return sum;
}
INLINE V power(V shifted) { return bits<V>((bits<I>(shifted) << SHIFT) + bits<I>(splat(1))); }
constexpr double LOG2E = 1.4426950408889634074;
constexpr real LOG2E_HIGH = LOG2E;
constexpr real LOG2E_REST = sizeof(real) == 4 ? LOG2E - double(LOG2E_HIGH) : 2.0355273740931033e-17;
INLINE V exp_minus_one_from_2(V y) {  // 2^y − 1, accurate near 0
  V shifted = y + ROUND, fraction = y - (shifted - ROUND), scale = power(shifted);
  return fraction * poly(EXP2, fraction) * scale + (scale - 1);
}
INLINE V exponential(V x) {
  x = high(low(x, sizeof(real) == 4 ? 88 : 709), sizeof(real) == 4 ? -87 : -708);
  V shifted = x * LOG2E_HIGH + ROUND, n = shifted - ROUND, scale = power(shifted);
  V fraction = (x * LOG2E_HIGH - n) + x * LOG2E_REST;
  return fraction * poly(EXP2, fraction) * scale + scale;
}
INLINE V hyperbolic_tangent(V x) {
  constexpr real end = sizeof(real) == 4 ? 9.1 : 19.2;
  V top = exp_minus_one_from_2(high(low(x, end), -end) * real(2 * LOG2E));
  return top * inverse(top + 2);
}
INLINE V error_function(V z) {
  constexpr real root = sizeof(real) == 4 ? 4 : 6;
  V sign = z < 0 ? splat(-1) : splat(1), beyond = z;
  z = high(low(z, root), -root);
  V t = z * z * (2 / ERF_END) - 1, first = {}, second = {};
  for (int i = sizeof(ERF) / sizeof(real) - 1; i > 0; --i) {
    V next = 2 * t * first - second + ERF[i];
    second = first, first = next;
  }
  return positive(beyond) > root ? sign : z * (t * first - second + ERF[0]);
}
INLINE V log_one_plus(V u) {  // 0 ≤ u ≤ 1
  V z = u / (u + 2);
  return 2 * z * poly(ATANH, z * z);
}
INLINE V logarithm(V x) {  // of normal positive numbers
  constexpr int BIAS_OF = sizeof(real) == 4 ? 127 : 1023;
  I exponent = (bits<I>(x) >> SHIFT) - BIAS_OF;
  V mantissa = bits<V>(bits<I>(x) - (exponent << SHIFT)), n = __builtin_convertvector(exponent, V);
  I large = mantissa > real(1.4142135623730951);
  mantissa = large ? mantissa * real(0.5) : mantissa;
  n = large ? n + 1 : n;
  V z = (mantissa - 1) / (mantissa + 1);
  V result = n * real(0.69314718055994531) + 2 * z * poly(ATANH, z * z);
  return x - x == 0 ? result : x;  // infinity and NaN stay
}

template <int L> INLINE V activation(V x, V& slope) {
  constexpr Activation kind = ACTIVATION[L];
  constexpr real first = FIRST[L], second = SECOND[L];
  if constexpr (kind == TANH) return hyperbolic_tangent(x);
  if constexpr (kind == RELU) return x < 0 ? V{} : x;
  if constexpr (kind == SIGMOID) return inverse(1 + exponential(-x));
  if constexpr (kind == SILU) {
    V s = inverse(1 + exponential(-x)), h = x * s;
    slope = s + h * (1 - s);
    return h;
  }
  if constexpr (kind == SOFTPLUS) {  // first: beta, second: threshold
    V y = x * first, e = exponential(-positive(y)), share = inverse(1 + e);
    V h = ((y > 0 ? y : V{}) + log_one_plus(e)) * real(1 / FIRST[L]);
    slope = y > second ? splat(1) : (y < 0 ? e * share : share);
    return y > second ? x : h;
  }
  if constexpr (kind == LEAKY_RELU) { slope = x > 0 ? splat(1) : splat(first); return x > 0 ? x : x * first; }
  if constexpr (kind == ELU) {
    V e = first * exp_minus_one_from_2(high(low(x, 0), sizeof(real) == 4 ? -87 : -708) * LOG2E_HIGH);
    slope = x > 0 ? splat(1) : e + first;
    return x > 0 ? x : e;
  }
  if constexpr (kind == GELU_TANH) {
    constexpr real root = 0.79788456080286535588, cubic = 0.044715;
    V square = x * x, t = hyperbolic_tangent(root * x * (1 + cubic * square)), half = real(0.5) * (1 + t);
    slope = half + real(0.5) * x * (1 - t * t) * root * (1 + 3 * cubic * square);
    return x * half;
  }
  if constexpr (kind == GELU) {
    V share = real(0.5) * (1 + error_function(x * real(0.70710678118654752440)));
    slope = share + x * real(0.39894228040143267794) * exponential(real(-0.5) * x * x);
    return x * share;
  }
  return x;
}
template <int L> INLINE V slope_from(V h) {
  if constexpr (ACTIVATION[L] == TANH) return 1 - h * h;
  if constexpr (ACTIVATION[L] == RELU) return h > 0 ? splat(1) : V{};
  if constexpr (ACTIVATION[L] == SIGMOID) return h * (1 - h);
  return splat(1);
}
