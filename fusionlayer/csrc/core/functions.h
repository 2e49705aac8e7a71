// Logarithm, exponential and the normal quantile in f64, made of sums, products and quotients alone: the bits are the same
// wherever they are computed, which those of a mathematical library are not. Off by a few units in the last place.
#pragma once

#include <cmath>

#include "portable.h"

namespace fl {

constexpr double kLn2High = 0x1.62e42feep-1;  // 32 bits: its product with an exponent is exact
constexpr double kLn2Low = 0x1.a39ef35793c76p-33;

// Of a normal number above 0: 2 artanh s of s = (m - 1) / (m + 1), where m is within a factor sqrt 2 of 1.
FL_HD double natural_log(double v) {
  const uint64_t bits = double_bits(v);
  double exponent = double(int(bits >> 52) - 1023);
  double m = bits_double((bits & 0xfffffffffffffull) | 0x3ff0000000000000ull);
  if (m > 0x1.6a09e667f3bcdp0) {
    m *= 0.5;
    exponent += 1.0;
  }
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double sum = 0.0;
  FL_UNROLL
  for (int i = 10; i >= 0; --i) sum = sum * z + 1.0 / double(2 * i + 1);
  return exponent * kLn2High + (exponent * kLn2Low + 2.0 * s * sum);
}

// Of a number below 700; 0 below -700.
FL_HD double exponential(double v) {
  if (!(v > -700.0)) return 0.0;
  const double n = std::floor(v * 0x1.71547652b82fep0 + 0.5);
  const double r = (v - n * kLn2High) - n * kLn2Low;
  double sum = 1.0;
  FL_UNROLL
  for (int i = 15; i >= 1; --i) sum = sum * r * (1.0 / double(i)) + 1.0;
  return sum * bits_double(uint64_t(int64_t(n) + 1023) << 52);
}

FL_HD double power(double base, double exponent) { return exponential(exponent * natural_log(base)); }

FL_HD double polynomial(double r, double a, double b, double c, double d, double e, double f, double g, double h) {
  return ((((((a * r + b) * r + c) * r + d) * r + e) * r + f) * r + g) * r + h;
}

// What a standard normal variable exceeds with probability `tail`, 1e-11 to 1/2 (Wichura, 1988, algorithm AS 241).
FL_HD double normal_quantile(double tail) {
  const double q = 0.5 - tail;
  if (q <= 0.425) {
    const double r = 0.180625 - q * q;
    return q *
           polynomial(r, 2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
                      13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608) /
           polynomial(r, 5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
                      5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0);
  }
  const double r = std::sqrt(-natural_log(tail)) - 1.6;
  return polynomial(r, 7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177,
                    1.27045825245236838258, 3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959,
                    1.42343711074968357734) /
         polynomial(r, 1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966,
                    0.14810397642748007459, 0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0);
}

}  // namespace fl
