// The log joint of a perceptron, its gradient, and leapfrog paths, with the vectors of lanes.cpp. The constants in front (layers,
// offsets of weights, activations, likelihood, series) are written by native_source.py, which says what is computed.

// ---- Products. Unit u of OUT: begin(u) + Σ_k w[u·SU + k·SK] x[k], handed on by end(u, lane, value).
template <int K, long SU, long SK, int U, int G, class Begin, class End>
INLINE void block(const real* w, const real* x, int unit, int lane, Begin begin, End end) {
  V sum[U][G];
  UNROLL for (int u = 0; u < U; ++u) {
    V start = begin(unit + u);
    UNROLL for (int v = 0; v < G; ++v) sum[u][v] = start;
  }
  for (int k = 0; k < K; ++k) {
    V in[G];
    UNROLL for (int v = 0; v < G; ++v) in[v] = load(x + k * STRIDE + lane + v * LANES);
    UNROLL for (int u = 0; u < U; ++u) {
      V weight = splat(w[(unit + u) * SU + k * SK]);
      UNROLL for (int v = 0; v < G; ++v) sum[u][v] += weight * in[v];
    }
  }
  UNROLL for (int u = 0; u < U; ++u)
    UNROLL for (int v = 0; v < G; ++v) end(unit + u, u, lane + v * LANES, sum[u][v]);
}
template <int K, long SU, long SK, int U, class Begin, class End, class Leave>
INLINE void strip(const real* w, const real* x, int vectors, int unit, Begin begin, End end, Leave leave) {
  V sums[U] = {};  // of what end returns, along lanes
  auto collect = [&](int whole_unit, int u, int lane, V value) __attribute__((always_inline)) {
    sums[u] += end(whole_unit, lane, value);
  };
  int v = 0;
  for (; v + GROUP <= vectors; v += GROUP) block<K, SU, SK, U, GROUP>(w, x, unit, v * LANES, begin, collect);
  for (; v < vectors; ++v) block<K, SU, SK, U, 1>(w, x, unit, v * LANES, begin, collect);
  UNROLL for (int u = 0; u < U; ++u) leave(unit + u, sums[u]);
}
template <int OUT, int K, long SU, long SK, class Begin, class End, class Leave>
INLINE void product(const real* w, const real* x, int vectors, Begin begin, End end, Leave leave) {
  int unit = 0;
  for (; unit + BLOCK <= OUT; unit += BLOCK) strip<K, SU, SK, BLOCK>(w, x, vectors, unit, begin, end, leave);
  if constexpr (OUT % BLOCK) strip<K, SU, SK, OUT % BLOCK>(w, x, vectors, unit, begin, end, leave);
}

// gradient[a·IN + b] += Σ_lanes delta[a] x[b]
template <int IN, int A, int B> INLINE void dots(const real* delta, const real* x, int vectors, real* gradient) {
  V sum[A][B] = {};
  for (int v = 0; v < vectors; ++v) {
    V left[A];
    UNROLL for (int a = 0; a < A; ++a) left[a] = load(delta + a * STRIDE + v * LANES);
    UNROLL for (int b = 0; b < B; ++b) {
      V right = load(x + b * STRIDE + v * LANES);
      UNROLL for (int a = 0; a < A; ++a) sum[a][b] += left[a] * right;
    }
  }
  UNROLL for (int a = 0; a < A; ++a)
    UNROLL for (int b = 0; b < B; ++b) gradient[a * IN + b] += total(sum[a][b]);
}
template <int IN, int A> INLINE void row_of_dots(const real* delta, const real* x, int vectors, real* gradient) {
  int b = 0;
  for (; b + COLUMNS <= IN; b += COLUMNS) dots<IN, A, COLUMNS>(delta, x + b * STRIDE, vectors, gradient + b);
  if constexpr (IN % COLUMNS) dots<IN, A, IN % COLUMNS>(delta, x + b * STRIDE, vectors, gradient + b);
}
template <int OUT, int IN> static void outer(const real* delta, const real* x, int vectors, real* gradient) {
  int a = 0;
  for (; a + ROWS <= OUT; a += ROWS) row_of_dots<IN, ROWS>(delta + a * STRIDE, x, vectors, gradient + a * IN);
  if constexpr (OUT % ROWS) row_of_dots<IN, OUT % ROWS>(delta + a * STRIDE, x, vectors, gradient + a * IN);
}

// ---- One pass over the data.
struct Problem {
  long vectors;         // of all examples
  const real* inputs;   // [tiles][WIDTH[0]][STRIDE], where STRIDE holds TILE vectors
  const real* targets;  // [tiles][outputs, or 1 for classes][STRIDE]
  const real* weights;  // [tiles][STRIDE], 0 behind the last example
  const double* scales; // [outputs], where they are fixed
  double weight;        // Σ of the examples' weights
  double lost;          // what the log-likelihood is less in other units of the targets
};
constexpr bool VARYING = LIKELIHOOD >= FOR_HETEROSCEDASTIC;  // outputs are locations and then raw scales, s = LEAST + softplus
constexpr int OUTPUTS = WIDTH[DEPTH], TARGETS = LIKELIHOOD == FOR_CATEGORICAL ? 1 : VARYING ? OUTPUTS / 2 : OUTPUTS;
constexpr double HALF_LOG_2PI = 0.91893853320467274178;
constexpr bool STUDENT = (LIKELIHOOD >= FOR_STUDENT && LIKELIHOOD <= FOR_STUDENT_PER_OUTPUT) ||
                         LIKELIHOOD == FOR_HETEROSCEDASTIC_STUDENT;
constexpr bool LOCATED = LIKELIHOOD <= FOR_STUDENT_PER_OUTPUT;  // outputs are locations, and there is a scale
constexpr bool ONE_SCALE = LIKELIHOOD == FOR_GAUSSIAN_LEARNED || LIKELIHOOD == FOR_STUDENT_LEARNED;
constexpr bool OWN_SCALES = LIKELIHOOD == FOR_GAUSSIAN_PER_OUTPUT || LIKELIHOOD == FOR_STUDENT_PER_OUTPUT;
struct Noise { real inverse_scale[OUTPUTS], df; };

struct Work {
  real *values, *slopes, *delta, *other, *gradient;
  double noise[OUTPUTS + 1];  // of each output Σ w z², for Student's t Σ w z²(df + 1)/(df + z²); last Σ w log(1 + z²/df) of all
  Work* next;  // of those that nobody uses
  static Work* made() {
    void* memory;
    const long head = (sizeof(Work) + 63) / 64 * 64, count = HELD * STRIDE + SIZE;
    if (posix_memalign(&memory, 4096, head + sizeof(real) * count)) return nullptr;
    Work* work = static_cast<Work*>(memory);
    work->values = reinterpret_cast<real*>(static_cast<char*>(memory) + head);
    work->slopes = work->values + rows_of(DEPTH) * STRIDE, work->delta = work->slopes + stored_of(DEPTH) * STRIDE;
    work->other = work->delta + widest() * STRIDE, work->gradient = work->other + widest() * STRIDE;
    return work;
  }
};

template <int L> static void forward(const real* q, const real* x, int vectors, Work& work) {
  real* out = work.values + rows_of(L) * STRIDE;
  real* slopes = work.slopes + stored_of(L) * STRIDE;
  product<WIDTH[L + 1], WIDTH[L], WIDTH[L], 1>(
      q + WEIGHT[L], x, vectors, [&](int u) { return BIAS[L] < 0 ? V{} : splat(q[BIAS[L] + u]); },
      [&](int u, int lane, V value) __attribute__((always_inline)) {
        V slope = {};
        store(out + u * STRIDE + lane, activation<L>(value, slope));
        if constexpr (stored(L)) store(slopes + u * STRIDE + lane, slope);
        return V{};
      },
      [](int, V) {});
  if constexpr (L + 1 < DEPTH) forward<L + 1>(q, out, vectors, work);
}

template <int L> INLINE V slope_at(const Work& work, int unit, int lane) {
  if constexpr (stored(L)) return load(work.slopes + (stored_of(L) + unit) * STRIDE + lane);
  return slope_from<L>(load(work.values + (rows_of(L) + unit) * STRIDE + lane));
}

template <int L> static void backward(const real* q, const real* x, int vectors, Work& work, real* delta, real* other) {
  const real* in = L ? work.values + rows_of(L ? L - 1 : 0) * STRIDE : x;
  outer<WIDTH[L + 1], WIDTH[L]>(delta, in, vectors, work.gradient + WEIGHT[L]);
  if constexpr (L > 0) {
    product<WIDTH[L], WIDTH[L + 1], 1, WIDTH[L]>(
        q + WEIGHT[L], delta, vectors, [](int) { return V{}; },
        [&](int u, int lane, V value) __attribute__((always_inline)) {
          V found = value * slope_at<L - 1>(work, u, lane);
          store(other + u * STRIDE + lane, found);
          return found;
        },
        [&](int u, V sum) { if (BIAS[L - 1] >= 0) work.gradient[BIAS[L - 1] + u] += total(sum); });
    backward<L - 1>(q, x, vectors, work, other, delta);
  }
}

// Log-likelihood of a tile without constants; its gradient in the outputs goes to delta. Where outputs are locations, what
// `Work::noise` holds is added up as well.
template <bool GRADIENT>
static double likelihood(const real* f, const real* y, const real* w, int vectors, const Noise& scales, real* delta,
                         double* noise) {
  double sum = 0;
  if constexpr (LIKELIHOOD == FOR_CATEGORICAL) {
    Exact part = {};
    for (int lane = 0; lane < vectors * LANES; lane += LANES) {
      V most = load(f + lane), chosen = {}, all = {}, label = load(y + lane), weight = load(w + lane);
      for (int o = 1; o < OUTPUTS; ++o) { V value = load(f + o * STRIDE + lane); most = value > most ? value : most; }
      for (int o = 0; o < OUTPUTS; ++o) {
        V value = load(f + o * STRIDE + lane) - most, e = exponential(value);
        chosen = label == splat(o) ? value : chosen;
        all += e;
        if constexpr (GRADIENT) store(delta + o * STRIDE + lane, e);
      }
      part += exact(weight * (chosen - logarithm(all)));
      if constexpr (GRADIENT) {
        V share = weight / all;
        for (int o = 0; o < OUTPUTS; ++o) {
          V e = load(delta + o * STRIDE + lane);
          store(delta + o * STRIDE + lane, (label == splat(o) ? weight : V{}) - e * share);
        }
      }
    }
    sum = exact_total(part);
  } else if constexpr (VARYING) {
    for (int o = 0; o < TARGETS; ++o) {
      Exact part = {}, pulled = {}, tails = {};
      for (int lane = 0; lane < vectors * LANES; lane += LANES) {
        V raw = load(f + (TARGETS + o) * STRIDE + lane), target = load(y + o * STRIDE + lane), weight = load(w + lane);
        V e = exponential(-positive(raw)), share = 1 / (1 + e);
        V scale = (raw > 0 ? raw : V{}) + log_one_plus(e) + LEAST, inverse_scale = 1 / scale;
        V z = (target - load(f + o * STRIDE + lane)) * inverse_scale, scaled = z;
        part += exact(-weight * logarithm(scale));
        if constexpr (STUDENT) {
          const V square = z * z;
          tails += exact(weight * logarithm(1 + square * (1 / scales.df)));
          scaled *= (scales.df + 1) / (scales.df + square);
        }
        pulled += exact(weight * scaled * z);
        if constexpr (GRADIENT) {
          V slope = weight * inverse_scale;
          store(delta + o * STRIDE + lane, slope * scaled);
          store(delta + (TARGETS + o) * STRIDE + lane, slope * (scaled * z - 1) * (raw < 0 ? e * share : share));
        }
      }
      sum += exact_total(part), noise[o] += exact_total(pulled);
      if constexpr (STUDENT) noise[OUTPUTS] += exact_total(tails);
    }
  } else {
    for (int o = 0; o < OUTPUTS; ++o) {
      Exact part = {}, tails = {};
      for (int lane = 0; lane < vectors * LANES; lane += LANES) {
        V value = load(f + o * STRIDE + lane), target = load(y + o * STRIDE + lane), weight = load(w + lane), slope;
        if constexpr (LIKELIHOOD == FOR_BERNOULLI) {
          V e = exponential(-positive(value)), share = 1 / (1 + e);
          part += exact(weight * (target * value - (value > 0 ? value : V{}) - log_one_plus(e)));
          slope = weight * (target - (value < 0 ? e * share : share));
        } else {
          V z = (target - value) * scales.inverse_scale[o], scaled = weight * z;
          if constexpr (STUDENT) {
            const V square = z * z;
            tails += exact(weight * logarithm(1 + square * (1 / scales.df)));
            scaled *= (scales.df + 1) / (scales.df + square);
          }
          part += exact(scaled * z);
          slope = scaled * scales.inverse_scale[o];
        }
        if constexpr (GRADIENT) store(delta + o * STRIDE + lane, slope);
      }
      if constexpr (LIKELIHOOD == FOR_BERNOULLI) sum += exact_total(part);
      else noise[o] += exact_total(part);
      if constexpr (STUDENT) noise[OUTPUTS] += exact_total(tails);
    }
  }
  return sum;
}

// Tiles first … last − 1: their log-likelihood without constants; its gradient goes to work.gradient.
template <bool GRADIENT>
static double pass(const Problem& problem, const real* q, Work& work, long first, long last, const Noise& scales) {
  double sum = 0;
  for (double& each : work.noise) each = 0;
  if constexpr (GRADIENT) memset(work.gradient, 0, sizeof(real) * SIZE);
  for (long tile = first; tile < last; ++tile) {
    const long rest = problem.vectors - tile * TILE;
    const int vectors = rest < TILE ? rest : TILE;
    const real* x = problem.inputs + tile * WIDTH[0] * STRIDE;
    const real* f = work.values + rows_of(DEPTH - 1) * STRIDE;
    forward<0>(q, x, vectors, work);
    sum += likelihood<GRADIENT>(f, problem.targets + tile * TARGETS * STRIDE, problem.weights + tile * STRIDE, vectors,
                                scales, work.delta, work.noise);
    if constexpr (GRADIENT) {
      for (int o = 0; o < OUTPUTS; ++o) {
        V all = {};
        for (int lane = 0; lane < vectors * LANES; lane += LANES) {
          V value = load(work.delta + o * STRIDE + lane);
          if constexpr (ACTIVATION[DEPTH - 1] != IDENTITY) {
            value *= slope_at<DEPTH - 1>(work, o, lane);
            store(work.delta + o * STRIDE + lane, value);
          }
          all += value;
        }
        if (BIAS[DEPTH - 1] >= 0) work.gradient[BIAS[DEPTH - 1] + o] += total(all);
      }
      backward<DEPTH - 1>(q, x, vectors, work, work.delta, work.other);
    }
  }
  return sum;
}

// ---- Threads. Workspaces are kept, since fresh pages cost as much as a pass over small data.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Work* spare = nullptr;
static Work* taken() {  // nobody waits for the lock: a process may have been forked while another thread held it
  Work* work = nullptr;
  if (!pthread_mutex_trylock(&lock)) {
    work = spare;
    if (work) spare = work->next;
    pthread_mutex_unlock(&lock);
  }
  return work ? work : Work::made();
}
static void put_back(Work* work) {
  if (pthread_mutex_trylock(&lock)) { free(work); return; }
  work->next = spare, spare = work;
  pthread_mutex_unlock(&lock);
}
constexpr int MOST = 64;
template <class F> struct Team {  // function(0 … count − 1), each by whoever is free
  F& function;
  long count, next;
  static void* work(void* of) {
    Team& team = *static_cast<Team*>(of);
    for (long i; (i = __atomic_fetch_add(&team.next, 1, __ATOMIC_RELAXED)) < team.count;) team.function(i);
    return nullptr;
  }
};
template <class F> static void share(long count, int threads, F function) {
  Team<F> team{function, count, 0};
  pthread_t others[MOST];
  int started = 0;
  for (; started < MOST && started + 1 < threads && started + 1 < count; ++started)
    if (pthread_create(&others[started], nullptr, Team<F>::work, &team)) break;  // no more to be had: fewer do it
  Team<F>::work(&team);
  for (int i = 0; i < started; ++i) pthread_join(others[i], nullptr);
}
// Starting a thread takes as long as this many vector operations; with less to do for each there are fewer.
constexpr double WORTH = 2e5;
constexpr double operations() {  // for a vector of examples
  double sum = 0;
  for (int l = 0; l < DEPTH; ++l) sum += (l ? 3.0 : 2.0) * WIDTH[l] * WIDTH[l + 1] + 25.0 * WIDTH[l + 1];
  return sum;
}
static int worthwhile(double work, int threads) {
  const double most = work / WORTH;
  return most < 1 ? 1 : most < threads ? int(most) : threads < MOST ? threads : MOST;
}

static double digamma(double x) {  // by recurrence to where Stirling's series is exact
  double sum = 0;
  for (; x < 8; ++x) sum -= 1 / x;
  const double square = 1 / (x * x);
  return sum + log(x) - 0.5 / x -
         square * (1.0 / 12 - square * (1.0 / 120 - square * (1.0 / 252 - square * (1.0 / 240 - square * (1.0 / 132)))));
}

// The log-likelihood of all data, its gradient in work.gradient; examples are divided where threads outnumber chains.
template <bool GRADIENT> static double whole_pass(const Problem& problem, const real* q, Work& work, int threads) {
  double sum = -problem.lost;
  Noise scales;
  double df = 1;
  if constexpr (STUDENT) df = FREEDOM < 0 ? DF : LEAST_DF + DF * exp(double(q[FREEDOM]));
  const double normaliser =
      STUDENT ? lgamma(0.5 * df) - lgamma(0.5 * (df + 1)) + 0.5 * log(df * 3.14159265358979323846) : HALF_LOG_2PI;
  scales.df = df;
  if constexpr (VARYING) sum -= problem.weight * TARGETS * normaliser;
  if constexpr (LOCATED) {
    for (int o = 0; o < OUTPUTS; ++o) {
      double log_scale = ONE_SCALE || OWN_SCALES ? double(q[NOISE + (OWN_SCALES ? o : 0)]) : log(problem.scales[o]);
      scales.inverse_scale[o] = exp(-log_scale);
      sum -= problem.weight * (log_scale + normaliser);
    }
  }
  const long tiles = (problem.vectors + TILE - 1) / TILE;
  int parts = threads > 1 ? worthwhile(problem.vectors * operations() / 4, threads) : 1;
  if (parts > tiles) parts = tiles;
  Work* works[MOST] = {&work};
  for (int i = 1; i < parts; ++i)
    if (!(works[i] = taken())) parts = i;
  if (parts == 1) sum += pass<GRADIENT>(problem, q, work, 0, tiles, scales);
  else {
    double sums[MOST];
    share(parts, parts, [&](long i) {
      sums[i] = pass<GRADIENT>(problem, q, *works[i], i * tiles / parts, (i + 1) * tiles / parts, scales);
    });
    for (int i = 0; i < parts; ++i) sum += sums[i];
    for (int i = 1; i < parts; ++i) {
      if constexpr (GRADIENT) for (long j = 0; j < SIZE; ++j) work.gradient[j] += works[i]->gradient[j];
      for (int o = 0; o <= OUTPUTS; ++o) work.noise[o] += works[i]->noise[o];
      put_back(works[i]);
    }
  }
  if constexpr (STUDENT) sum -= 0.5 * (df + 1) * work.noise[OUTPUTS];
  else if constexpr (LOCATED || VARYING) for (int o = 0; o < TARGETS; ++o) sum -= 0.5 * work.noise[o];
  if constexpr (GRADIENT && ONE_SCALE) {
    double all = 0;
    for (int o = 0; o < OUTPUTS; ++o) all += work.noise[o] - problem.weight;
    work.gradient[NOISE] = all;
  }
  if constexpr (GRADIENT && OWN_SCALES)
    for (int o = 0; o < OUTPUTS; ++o) work.gradient[NOISE + o] = work.noise[o] - problem.weight;
  if constexpr (GRADIENT && STUDENT && FREEDOM >= 0) {
    double pulled = 0;
    for (int o = 0; o < TARGETS; ++o) pulled += work.noise[o];
    const double slope_of_normaliser = digamma(0.5 * (df + 1)) - digamma(0.5 * df) - 1 / df;
    const double slope = TARGETS * problem.weight * slope_of_normaliser - work.noise[OUTPUTS] + pulled / df;
    work.gradient[FREEDOM] = 0.5 * slope * (df - LEAST_DF);
  }
  return sum;
}

// function(chain, workspace, threads for it) for all chains; `work` is that of one, in vector operations
template <class F> static int each_chain(long chains, int threads, double work, F function) {
  if (chains < 1) return 0;
  threads = threads < 1 ? 1 : threads < MOST ? threads : MOST;
  const int used = chains < threads ? chains : threads, inner = threads / used;
  Work* works[MOST] = {};
  int ready = worthwhile(chains * work, used), made = 0;
  for (; made < ready && (works[made] = taken()); ++made) {}
  if (!made) return 1;
  long next = 0;
  share(made, made, [&](long i) {
    for (long chain; (chain = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < chains;) function(chain, *works[i], inner);
  });
  for (int i = 0; i < made; ++i) put_back(works[i]);
  return 0;
}

// ---- The prior N(0, 1/precision), and all of it together.
struct Density {
  const double* beta;     // [chains], or null: 1
  const real* precision;  // [chains][P] or [P], or null: flat
  long precision_stride;  // from chain to chain, 0 for all alike
  double scale;           // 1 / temperature
};
static double log_normaliser(const real* precision) {
  double sum = 0, product = 1;
  for (long i = 0; i < SIZE; ++i) {
    product *= precision[i];
    if (i % 8 == 7 || !(product > 1e-200 && product < 1e200)) { sum += log(product); product = 1; }
  }
  return 0.5 * (sum + log(product)) - SIZE * HALF_LOG_2PI;
}
static double half_square(const real* precision, const real* q) {
  double sums[8] = {};
  long i = 0;
  for (; i + 8 <= SIZE; i += 8)
    for (int j = 0; j < 8; ++j) sums[j] += double(precision[i + j]) * (double(q[i + j]) * q[i + j]);
  for (; i < SIZE; ++i) sums[0] += double(precision[i]) * (double(q[i]) * q[i]);
  return 0.5 * (((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7])));
}
static void finish(const Density& density, long chain, const real* __restrict q, const real* __restrict from,
                   real* __restrict gradient) {
  const real* precision = density.precision ? density.precision + chain * density.precision_stride : nullptr;
  const real beta = (density.beta ? density.beta[chain] : 1.0) * density.scale, scale = density.scale;
  if (precision) for (long i = 0; i < SIZE; ++i) gradient[i] = beta * from[i] - scale * precision[i] * q[i];
  else for (long i = 0; i < SIZE; ++i) gradient[i] = beta * from[i];
}

extern "C" {
void layout(long* found) { found[0] = LANES, found[1] = TILE, found[2] = STRIDE; }

// Values, and where `gradient` is given gradients, at q [chains][P].
int evaluate(const Problem* problem, const Density* density, long chains, int threads, const real* q, real* gradient,
             double* log_likelihood, double* log_prior) {
  return each_chain(chains, threads, problem->vectors * operations(), [&](long c, Work& work, int inner) {
    const real* at = q + c * SIZE;
    log_likelihood[c] = density->scale * (gradient ? whole_pass<true>(*problem, at, work, inner)
                                                   : whole_pass<false>(*problem, at, work, inner));
    if (gradient) finish(*density, c, at, work.gradient, gradient + c * SIZE);
    if (density->precision) {
      const real* precision = density->precision + c * density->precision_stride;
      log_prior[c] = density->scale * (log_normaliser(precision) - half_square(precision, at));
    }
  });
}

// `count` leapfrog steps from (q, p) with its gradient, inverse masses [chains][P] or (stride 0) [P]. The end is written to
// [chains][P], or with `keep` every step to [chains][count][P].
int leapfrogs(const Problem* problem, const Density* density, long chains, int threads, long count, int keep,
              const real* q, const real* p, const real* gradient, const real* step, const real* mass, long mass_stride,
              real* to_q, real* to_p, real* to_gradient, double* log_likelihood, double* log_prior) {
  return each_chain(chains, threads, count * problem->vectors * operations(), [&](long c, Work& work, int inner) {
    const real* m = mass + c * mass_stride;
    const real* precision = density->precision + c * density->precision_stride;
    const double normaliser = log_normaliser(precision);
    const real size = step[c], half = real(0.5) * size;
    const real *from_q = q + c * SIZE, *from_p = p + c * SIZE, *from_g = gradient + c * SIZE;
    for (long i = 0; i < count; ++i) {
      const long row = keep ? c * count + i : c;
      real *at_q = to_q + row * SIZE, *at_p = to_p + row * SIZE, *at_g = to_gradient + row * SIZE;
      for (long j = 0; j < SIZE; ++j) {
        const real kicked = from_p[j] + half * from_g[j];
        at_p[j] = kicked;
        at_q[j] = from_q[j] + size * m[j] * kicked;
      }
      const double value = whole_pass<true>(*problem, at_q, work, inner);
      finish(*density, c, at_q, work.gradient, at_g);
      for (long j = 0; j < SIZE; ++j) at_p[j] += half * at_g[j];
      if (keep || i == count - 1) {
        log_likelihood[row] = density->scale * value;
        log_prior[row] = density->scale * (normaliser - half_square(precision, at_q));
      }
      from_q = at_q, from_p = at_p, from_g = at_g;
    }
  });
}
}
