// Trajectories that stop when they turn round: trees.py for one chain at a time, each by one thread, a state after the other.
// Pieces of path are joined as a binary counter carries, from single states on, so that a stop is seen where it happens.

constexpr long PADDED = (SIZE + LANES - 1) / LANES * LANES;  // vectors of weights end with zeros
constexpr double RUN_AWAY = 1000.0;

INLINE V read(const real* x) { V v; memcpy(&v, x, BYTES); return v; }
static void copy(real* to, const real* from) { memcpy(to, from, sizeof(real) * SIZE); }

struct Span { real *first, *last, *total; };  // momenta at both ends, in the order they were walked, and the sum of all

// Whether `one` and then `other` are straight together; `one` becomes both.
static bool joined(const real* mass, Span& one, const Span& other) {
  V found[6] = {};
  for (long j = 0; j < PADDED; j += LANES) {
    const V m = read(mass + j), begin = read(one.first + j), end = read(other.last + j), left = read(one.last + j);
    const V right = read(other.first + j), here = read(one.total + j), there = read(other.total + j);
    const V all = m * (here + there), nearer = m * (here + right), farther = m * (there + left);
    found[0] += begin * all, found[1] += end * all, found[2] += begin * nearer;
    found[3] += right * nearer, found[4] += left * farther, found[5] += end * farther;
    const V sum = here + there;
    memcpy(one.total + j, &sum, BYTES), memcpy(one.last + j, &end, BYTES);
  }
  for (int i = 0; i < 6; ++i) if (!(total(found[i]) > 0)) return false;
  return true;
}

static double log_add(double a, double b) {
  const double most = a > b ? a : b, least = a > b ? b : a;
  return most == -INFINITY ? most : most + log1p(exp(least - most));
}

struct Chosen { real *q, *g; double log_likelihood, log_prior, energy; };
static void choose(Chosen& to, const Chosen& from) {
  copy(to.q, from.q), copy(to.g, from.g);
  to.log_likelihood = from.log_likelihood, to.log_prior = from.log_prior, to.energy = from.energy;
}

extern "C" {
// One tree of each chain; `uniform` [chains][columns] as trees.py orders it. The state chosen goes to to_q, to_gradient and `numbers`
// [chains][7]: its log-likelihood, log prior and energy, mean acceptance, whether it ran away, leapfrogs, doublings.
int trees(const Problem* problem, const Density* density, long chains, int threads, long max_depth, long length, const real* q,
          const real* p, const real* gradient, const double* log_likelihood, const double* log_prior, const real* step,
          const real* mass, long mass_stride, const double* uniform, long columns, real* to_q, real* to_gradient,
          double* numbers) {
  const long block = length < (1L << (max_depth - 1)) ? length : 1L << (max_depth - 1);
  const long vectors = 2 * block + 6 + 3 * (max_depth + 3) + 4;
  int missing = 0;
  const int failed = each_chain(chains, threads, block * problem->vectors * operations(), [&](long c, Work& work, int inner) {
    void* memory;
    const long bytes = sizeof(real) * vectors * PADDED + sizeof(double) * 4 * block;
    if (posix_memalign(&memory, 64, bytes)) { __atomic_store_n(&missing, 1, __ATOMIC_RELAXED); return; }
    memset(memory, 0, bytes);
    real* next = static_cast<real*>(memory);
    auto vector = [&] { real* found = next; next += PADDED; return found; };
    real *path_q = next, *path_g = next + block * PADDED;
    next += 2 * block * PADDED;
    struct { real *q, *p, *g; } ends[2];
    for (auto& end : ends) {
      end = {vector(), vector(), vector()};
      copy(end.q, q + c * SIZE), copy(end.p, p + c * SIZE), copy(end.g, gradient + c * SIZE);
    }
    Span whole{vector(), vector(), vector()}, pieces[64];
    for (long i = 0; i < max_depth + 2; ++i) pieces[i] = {vector(), vector(), vector()};
    copy(whole.total, ends[0].p);
    real *momentum = vector(), *m = vector();
    copy(m, mass + c * mass_stride);
    Chosen half{vector(), vector()}, sample{to_q + c * SIZE, to_gradient + c * SIZE};
    double* kept = reinterpret_cast<double*>(next);  // gain, log-likelihood, log prior, energy of a block's states

    const real* precision = density->precision + c * density->precision_stride;
    const double normaliser = log_normaliser(precision), beta = density->beta ? density->beta[c] : 1.0;
    auto energy_at = [&](const real* momentum, double likelihood, double prior) {
      return half_square(m, momentum) - (beta * likelihood + prior);
    };
    const double start = energy_at(ends[0].p, log_likelihood[c], log_prior[c]);
    choose(sample, {ends[0].q, ends[0].g, log_likelihood[c], log_prior[c], start});
    double log_weight = 0, accepted = 0;
    long states = 0, depth = 0;
    bool ran = false, straight = true;
    const double* u = uniform + c * columns;

    for (; depth < max_depth && straight; ++depth) {
      const long states_of_half = 1L << depth, size = states_of_half < block ? states_of_half : block;
      const int side = u[0] >= 0.5;
      const real whole_step = side ? step[c] : -step[c], half_step = real(0.5) * whole_step;
      copy(momentum, ends[side].p);
      const real *from_q = ends[side].q, *from_g = ends[side].g;
      double half_weight = -INFINITY;
      long level = 0;  // pieces that wait to be joined
      for (long i = 0; i < states_of_half && straight; ++i) {
        const long place = i % size;
        real *at_q = path_q + place * PADDED, *at_g = path_g + place * PADDED;
        for (long j = 0; j < SIZE; ++j) {
          momentum[j] += half_step * from_g[j];
          at_q[j] = from_q[j] + whole_step * m[j] * momentum[j];
        }
        const double likelihood = density->scale * whole_pass<true>(*problem, at_q, work, inner);
        finish(*density, c, at_q, work.gradient, at_g);
        for (long j = 0; j < SIZE; ++j) momentum[j] += half_step * at_g[j];
        from_q = at_q, from_g = at_g;
        const double prior = density->scale * (normaliser - half_square(precision, at_q));
        const double energy = energy_at(momentum, likelihood, prior), gain = start - energy;
        ++states;
        if (!(gain >= -RUN_AWAY && gain < INFINITY)) { ran = true, straight = false; break; }
        accepted += gain < 0 ? exp(gain) : 1.0;
        double* numbers_here = kept + 4 * place;
        numbers_here[0] = gain, numbers_here[1] = likelihood, numbers_here[2] = prior, numbers_here[3] = energy;

        copy(pieces[level].first, momentum), copy(pieces[level].last, momentum), copy(pieces[level].total, momentum);
        ++level;
        for (long number = i + 1; straight && number % 2 == 0; number /= 2, --level)
          straight = joined(m, pieces[level - 2], pieces[level - 1]);
        if (!straight || place < size - 1) continue;

        const double* levels = u + 2 + 2 * (i / size);  // a block is whole: one of its states, and it or those before
        double most = -INFINITY, sum = 0, level_sum = 0;
        for (long k = 0; k < size; ++k) most = kept[4 * k] > most ? kept[4 * k] : most;
        for (long k = 0; k < size; ++k) sum += exp(kept[4 * k] - most);
        const double weight = most + log(sum);
        half_weight = log_add(half_weight, weight);
        if (i >= size && !(log(levels[1]) < weight - half_weight)) continue;
        long taken = 0;
        while (taken < size - 1 && (level_sum += exp(kept[4 * taken] - most)) <= levels[0] * sum) ++taken;
        const double* found = kept + 4 * taken;
        choose(half, {path_q + taken * PADDED, path_g + taken * PADDED, found[1], found[2], found[3]});
      }
      if (!straight) break;
      if (log(u[1]) < half_weight - log_weight) choose(sample, half);
      log_weight = log_add(log_weight, half_weight);
      copy(whole.first, ends[1 - side].p), copy(whole.last, ends[side].p);
      straight = joined(m, whole, pieces[0]);
      copy(ends[side].p, momentum), copy(ends[side].q, from_q), copy(ends[side].g, from_g);
      u += 2 + 2 * (states_of_half / size);
    }
    const double results[7] = {sample.log_likelihood, sample.log_prior, sample.energy, accepted / (states ? states : 1),
                               double(ran), double(states), double(depth)};
    memcpy(numbers + 7 * c, results, sizeof(results));
    free(memory);
  });
  return failed || missing;
}
}
