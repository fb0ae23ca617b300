"""The paper's numbers, to stand beside ours: mean and standard error over ten repetitions."""

from __future__ import annotations

import re

Cell = tuple[float, float]


def _table(columns: str, text: str) -> dict[str, dict[str, Cell]]:
    """Data set -> column -> (mean, standard error), from lines of a name and cells such as -2.58(0.10)."""
    names = columns.split(", ")
    table = {}
    for line in text.strip().splitlines():
        name, *cells = line.split()
        pairs = [re.fullmatch(r"(.+)\((.+)\)", cell) for cell in cells]
        values = [(float(pair[1]), float(pair[2])) for pair in pairs if pair is not None]
        table[name] = dict(zip(names, values, strict=True))
    return table


METHODS = "SGP L1, SGHMC L1, SGHMC L2, SGHMC L3, MF L2, MF L3, STAR L2, STAR L3"

INTERPOLATION = _table(
    METHODS,
    """
boston   -2.58(0.10) -2.75(0.18) -2.51(0.07) -2.53(0.09) -2.43(0.05) -2.48(0.06) -2.47(0.08) -2.43(0.05)
energy   -0.71(0.03) -1.16(0.44) -0.37(0.12) -0.34(0.11) -0.73(0.02) -0.75(0.02) -0.75(0.02) -0.75(0.02)
concrete -3.09(0.02) -3.50(0.34) -2.89(0.06) -2.88(0.06) -3.06(0.03) -3.09(0.02) -3.04(0.02) -3.05(0.02)
wine_red -0.88(0.01) -0.90(0.03) -0.81(0.03) -0.80(0.07) -0.89(0.01) -0.89(0.01) -0.88(0.01) -0.88(0.01)
kin8nm    1.05(0.01)  1.14(0.01)  1.38(0.01)  1.25(0.14)  1.30(0.01)  1.31(0.01)  1.28(0.01)  1.29(0.01)
power    -2.78(0.01) -2.75(0.02) -2.68(0.02) -2.65(0.02) -2.77(0.01) -2.76(0.01) -2.77(0.01) -2.77(0.01)
naval     7.56(0.09)  7.77(0.04)  7.32(0.02)  6.89(0.43)  7.11(0.11)  7.05(0.09)  7.06(0.08)  6.25(0.31)
protein  -2.91(0.00) -2.76(0.00) -2.64(0.01) -2.58(0.01) -2.83(0.00) -2.79(0.00) -2.83(0.00) -2.80(0.00)
""",
)
"""Table 1: test log-likelihood."""

EXTRAPOLATION = _table(
    METHODS,
    """
boston   -3.49(0.23) -3.57(0.16) -3.64(0.11) -3.64(0.08) -3.36(0.17) -3.41(0.19) -3.38(0.18) -3.38(0.18)
energy   -2.90(0.63) -3.22(0.69) -3.53(0.89) -3.26(0.75) -3.02(0.64) -3.45(0.86) -3.08(0.78) -2.95(0.74)
concrete -3.91(0.11) -3.90(0.06) -4.37(0.19) -4.71(0.33) -3.76(0.10) -3.71(0.09) -3.79(0.08) -3.68(0.08)
wine_red -1.01(0.02) -1.15(0.02) -1.22(0.03) -1.08(0.05) -1.02(0.02) -1.01(0.02) -1.01(0.02) -1.01(0.02)
kin8nm    0.66(0.04)  0.72(0.03)  1.06(0.03)  0.94(0.11)  0.96(0.03)  0.98(0.04)  0.98(0.02)  0.94(0.03)
power    -3.44(0.29) -4.27(0.41) -4.19(0.38) -4.09(0.35) -3.81(0.30) -3.82(0.31) -3.95(0.33) -3.82(0.27)
naval     3.20(0.32)  2.83(0.09)  3.16(0.14)  3.18(0.12)  2.33(0.43)  2.26(0.37)  2.20(0.22)  2.95(0.27)
protein  -3.20(0.04) -3.20(0.03) -3.17(0.02) -3.10(0.02) -3.31(0.04) -3.23(0.06) -3.23(0.04) -3.19(0.05)
""",
)
"""Table S1: test log-likelihood."""

STAR_BEATS = _table(
    "MF, SGHMC",
    """
boston    0.55(0.04)  0.50(0.05)
energy    0.73(0.05)  0.60(0.04)
concrete  0.57(0.04)  0.60(0.03)
wine_red  0.57(0.04)  0.63(0.02)
kin8nm    0.36(0.03)  0.44(0.05)
power     0.44(0.06)  0.64(0.03)
naval     0.67(0.06)  0.58(0.03)
protein   0.49(0.03)  0.50(0.03)
""",
)
"""Table 2: the fraction of test points, extrapolating, to which STAR gives a larger density; three layers."""

DIFFERENCES = _table(
    "MF vs STAR (dif), SGHMC vs STAR (dif), MF NG vs FC NG, MF NG vs FC NG (dif), MF NG vs MF",
    """
boston    0.036(0.029)    0.27(0.15)    0.58(0.04)  0.303(0.108)    0.63(0.04)
energy    0.500(0.202)    0.31(0.16)    0.70(0.05)  0.343(0.231)    0.77(0.05)
concrete  0.036(0.060)    1.03(0.33)    0.56(0.02)  0.145(0.070)    0.61(0.02)
wine_red  0.004(0.003)    0.07(0.05)    0.57(0.03)  0.018(0.003)    0.57(0.03)
kin8nm   -0.040(0.024)    0.00(0.11)    0.59(0.02)  0.028(0.016)    0.44(0.03)
power     0.005(0.096)    0.27(0.11)    0.68(0.03)  0.355(0.157)    0.52(0.05)
naval     0.693(0.527)   -0.22(0.23)    0.24(0.07) -0.178(0.112)    0.65(0.07)
protein   0.033(0.014)   -0.10(0.03)    0.50(0.01) -0.016(0.009)    0.47(0.02)
""",
)
"""Table S2: fractions, and differences (dif) of the mean log-likelihood; NG: trained with natural gradients."""

ELBO = _table(
    "MF, FC",
    """
boston      -510(30)     -246(5)
energy        510(8)     600(20)
concrete    -910(50)    -500(10)
wine_red    -1648(8)    -1575(4)
kin8nm    -2000(100)   -1290(70)
power       -390(90)     -10(50)
naval     33000(600)  34600(500)
protein  -44040(140) -42610(120)
""",
)
"""Table S3: three layers, natural gradients."""
