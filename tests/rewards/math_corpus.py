"""Pairs of a completion and a known answer, each with whether a teacher would mark it right.

The label comes from how a pair is made (from one exact value, or from two that differ), never from a checker.
`pairs()` always gives the same list.
"""

from collections.abc import Iterator
from fractions import Fraction
from random import Random
from typing import NamedTuple


class Pair(NamedTuple):
    kind: str
    completion: str
    reference: str
    right: bool


STYLES = (
    "{}",
    "\\boxed{{{}}}",
    "The answer is {}.",
    "**Answer:** {}",
    "#### {}",
    "So the result is $\\boxed{{{}}}$.",
    "First I tried 3, then 11.\nFinal answer: {}",
    "<answer>{}</answer>",
)
MATHS_STYLES = (*STYLES, "${}$", "Hence the value is ${}$.", "\\[ x = {} \\]", "\\( {} \\)")
NUMBER_STYLES = (*STYLES, "**{}**", "The total is **{}**.", "We get x = {}", "So it is `{}`.", "There are {} in all.")


def pairs() -> list[Pair]:
    random = Random(20)
    made = [pair for make in MAKERS for pair in make(random)]
    return list(dict.fromkeys(made)) + [Pair("by hand", *row) for row in BY_HAND]


def _integers(random: Random) -> Iterator[Pair]:
    for _ in range(90):
        value = random.choice([random.randint(-99, 999), random.randint(10**3, 10**7)])
        ways = [str(value), f"{value:,}", f"{value:,}".replace(",", "{,}"), f"{value}.0"]
        style = random.choice(NUMBER_STYLES)
        yield Pair("integer", style.format(random.choice(ways)), random.choice(ways[:2]), True)
        wrong = random.choice([value + 1, value - 1, -value if value else 1, value * 10 + 1])
        yield Pair("integer", style.format(random.choice([str(wrong), f"{wrong:,}"])), str(value), False)


def _large_integers(random: Random) -> Iterator[Pair]:
    for power in range(20, 60):
        value = 2**power + random.randint(0, 9)
        yield Pair("large integer", f"\\boxed{{{value}}}", str(value), True)
        yield Pair("large integer", f"\\boxed{{{value - 1}}}", str(value), False)
        yield Pair("large integer", f"It is {value + 1:,}", str(value), False)


def _money(random: Random) -> Iterator[Pair]:
    for _ in range(80):
        cents = random.randint(1, 99) + 100 * random.randint(0, 99_999)
        amount, other = f"{cents / 100:,.2f}", f"{(cents + random.choice([1, -1, 10])) / 100:,.2f}"
        style = random.choice(["${}", "\\boxed{{\\${}}}", "It costs ${} in total.", "{} dollars", "**${}**"])
        yield Pair("money", style.format(amount), f"{cents / 100:.2f}", True)
        yield Pair("money", style.format(other), f"{cents / 100:.2f}", False)


def _small_decimals(random: Random) -> Iterator[Pair]:
    for _ in range(40):
        digits, places = random.randint(1, 99), random.randint(3, 9)
        value, other = Fraction(digits, 10**places), Fraction(digits + 1, 10**places)
        texts = [f"{float(number):.{places}f}" for number in (value, other)]
        yield Pair("small decimal", random.choice(NUMBER_STYLES).format(texts[0]), texts[0] + "0", True)
        yield Pair("small decimal", random.choice(NUMBER_STYLES).format(texts[1]), texts[0], False)


def _fraction_ways(value: Fraction) -> list[str]:
    sign, top, bottom = "-" if value < 0 else "", abs(value.numerator), value.denominator
    ways = [f"{sign}{top}/{bottom}", f"{sign}\\frac{{{top}}}{{{bottom}}}", f"{sign}\\dfrac{{{top}}}{{{bottom}}}"]
    ways += [f"{sign}\\frac{{{top}}}{bottom}"] if bottom < 10 else []
    ways += [f"{sign}\\frac{top}{{{bottom}}}"] if top < 10 else []
    ways += [f"{sign}\\tfrac{top}{bottom}"] if top < 10 and bottom < 10 else []
    whole, rest = divmod(top, bottom)
    return ways + ([f"{sign}{whole}\\frac{{{rest}}}{{{bottom}}}"] if whole and rest else [])


def _fractions(random: Random) -> Iterator[Pair]:
    for _ in range(130):
        value = Fraction(random.randint(-60, 60) or 7, random.randint(2, 24))
        if value.denominator == 1:
            continue
        ways, reference = _fraction_ways(value), random.choice(_fraction_ways(value)[:2])
        yield Pair("fraction", random.choice(MATHS_STYLES).format(random.choice(ways)), reference, True)
        other = random.choice([-value, 1 / value, value + 1, value + Fraction(1, value.denominator)])
        if other != value:
            wrong = random.choice(_fraction_ways(other)) if other.denominator > 1 else str(other)
            yield Pair("fraction", random.choice(MATHS_STYLES).format(wrong), reference, False)
        if 10**6 % value.denominator == 0:
            yield Pair("fraction", random.choice(NUMBER_STYLES).format(f"{float(value)}"), reference, True)


def _percentages(random: Random) -> Iterator[Pair]:
    for _ in range(45):
        percent = random.randint(1, 99)
        yield Pair("percentage", random.choice([f"{percent}%", f"\\boxed{{{percent}\\%}}"]), str(percent), True)
        yield Pair("percentage", f"{percent}%", f"{percent / 100}", True)
        yield Pair("percentage", f"**{percent}%**", f"{percent}\\%", True)
        yield Pair("percentage", f"about {percent + 1}%", f"{percent}%", False)


def _roots_and_pi(random: Random) -> Iterator[Pair]:
    for _ in range(90):
        a, b, n = random.randint(2, 12), random.choice([1, 2, 3, 5, 7]), random.choice([2, 3, 5, 6, 7, 10, 11, 13])
        if Fraction(a, b).denominator != b:
            continue
        rest = random.choice([f"\\sqrt{{{n}}}", "\\pi"])
        short = rest.replace(f"{{{n}}}", str(n)) if n < 10 else rest
        ways = (
            [f"{a}{rest}", f"{a} {short}"] if b == 1 else [f"\\frac{{{a}{rest}}}{{{b}}}", f"\\frac{{{a}}}{{{b}}}{rest}"]
        )
        ways += [f"{a}π"] if rest == "\\pi" and b == 1 else []
        wrong = [ways[0].replace(str(a), str(a + 1), 1), "-" + ways[0], str(a)]
        style = random.choice(MATHS_STYLES)
        yield Pair("root or pi", style.format(random.choice(ways)), random.choice(ways[:2]), True)
        yield Pair("root or pi", style.format(random.choice(wrong)), ways[0], False)


def _groups(random: Random) -> Iterator[Pair]:
    for _ in range(80):
        members = random.sample(range(-9, 30), random.randint(2, 4))
        texts = [str(member) for member in members]
        mixed = random.sample(texts, len(texts))
        other = [*texts[:-1], str(members[-1] + 40)]
        style = random.choice(MATHS_STYLES)
        yield Pair("set", style.format("\\{" + ", ".join(mixed) + "\\}"), "\\{" + ",".join(texts) + "\\}", True)
        yield Pair("set", style.format("\\{" + ", ".join(other) + "\\}"), "\\{" + ",".join(texts) + "\\}", False)
        yield Pair("list", random.choice(STYLES[:2]).format(", ".join(mixed)), ", ".join(texts), True)
        yield Pair("list", random.choice(STYLES[:2]).format(", ".join(other)), ", ".join(texts), False)
        yield Pair("tuple", style.format(f"({', '.join(texts)})"), f"({','.join(texts)})", True)
        yield Pair("tuple", style.format(f"({', '.join(reversed(texts))})"), f"({','.join(texts)})", False)


def _intervals(random: Random) -> Iterator[Pair]:
    for _ in range(40):
        low, high = sorted(random.sample(range(-20, 20), 2))
        opening, closing = random.choice("(["), random.choice(")]")
        reference = f"{opening}{low},{high}{closing}"
        yield Pair("interval", f"$x \\in {opening}{low}, {high}{closing}$", reference, True)
        flipped = {"(": "[", "[": "("}[opening]
        yield Pair("interval", f"\\boxed{{{flipped}{low}, {high}{closing}}}", reference, False)
        union = f"(-\\infty, {low}) \\cup ({high}, \\infty)"
        yield Pair("interval", f"\\boxed{{({high},\\infty)\\cup(-\\infty,{low})}}", union, True)
        yield Pair("interval", f"\\boxed{{({high},\\infty)\\cup(-\\infty,{low}]}}", union, False)


def _sums(random: Random) -> Iterator[Pair]:
    for _ in range(60):
        a, b, c = (random.randint(2, 12) for _ in range(3))
        style = random.choice(MATHS_STYLES[1:3])
        yield Pair("polynomial", style.format(f"{b}x + {c} + {a}x^2"), f"{a}x^2+{b}x+{c}", True)
        yield Pair("polynomial", style.format(f"{a}x^2 - {b}x + {c}"), f"{a}x^2+{b}x+{c}", False)
        yield Pair("complex", style.format(f"{b}i + {a}"), f"{a}+{b}i", True)
        yield Pair("complex", style.format(f"{a} - {b}i"), f"{a}+{b}i", False)
        yield Pair("factors", style.format(f"(x-{b})(x+{a})"), f"(x+{a})(x-{b})", True)
        yield Pair("factors", style.format(f"(x+{b})(x-{a})"), f"(x+{a})(x-{b})", a == b)


UNITS = ("m", "cm", "km", "kg", "g", "s", "hours", "dollars", "apples", "degrees", "square feet", "mph", "L")


def _units(random: Random) -> Iterator[Pair]:
    for _ in range(70):
        value, unit = random.randint(2, 500), random.choice(UNITS)
        style = random.choice(["{} {}", "\\boxed{{{}\\text{{ {}}}}}", "\\boxed{{{}\\ \\mathrm{{{}}}}}", "It is {} {}."])
        yield Pair("unit", style.format(value, unit), random.choice([str(value), f"{value} {unit}"]), True)
        yield Pair("unit", style.format(value + 1, unit), f"{value} {unit}", False)
    for ours, theirs in (("m", "cm"), ("kg", "g"), ("hours", "minutes"), ("km", "m"), ("dollars", "cents")):
        yield Pair("unit", f"\\boxed{{5 \\text{{ {ours}}}}}", f"5 {theirs}", False)


def _scientific(random: Random) -> Iterator[Pair]:
    for _ in range(35):
        mantissa, power = random.randint(2, 9), random.randint(2, 8)
        way = random.choice(
            [f"{mantissa} \\times 10^{{{power}}}", f"{mantissa}\\cdot 10^{power}", f"{mantissa} × 10^{power}"]
        )
        yield Pair("scientific", f"\\boxed{{{way}}}", str(mantissa * 10**power), True)
        yield Pair("scientific", f"\\boxed{{{way}}}", str(mantissa * 10 ** (power + 1)), False)


def _choices(random: Random) -> Iterator[Pair]:
    for _ in range(30):
        letter, other = random.sample("ABCDE", 2)
        for style in ("({})", "\\boxed{{{}}}", "The answer is {}.", "\\boxed{{\\text{{{}}}}}", "**{}**"):
            yield Pair("choice", style.format(letter), letter, True)
            yield Pair("choice", style.format(other), letter, False)


MAKERS = (
    *(
        _integers,
        _large_integers,
        _money,
        _small_decimals,
        _fractions,
        _percentages,
        _roots_and_pi,
        _groups,
        _intervals,
    ),
    *(_sums, _units, _scientific, _choices),
)

# What people and models write, with a teacher's verdict.
BY_HAND = [
    ("**42**", "42", True),
    ("The answer is **42**.", "42", True),
    ("So she has *12* apples.", "12", True),
    ("__7__", "7", True),
    ("`3.5`", "3.5", True),
    ("2**3", "23", False),
    ("1048575", "1048576", False),
    ("1048576", "1048576", True),
    ("5 m", "5", True),
    ("5 m", "5 m", True),
    ("5m", "5", False),
    ("$5 \\text{ m}$", "5", True),
    ("\\frac{1}3", "1/3", True),
    ("\\frac1{3}", "\\frac{1}{3}", True),
    ("\\sqrt5", "\\sqrt{5}", True),
    ("√5", "\\sqrt{5}", True),
    ("sqrt(5)", "\\sqrt{5}", True),
    ("6\\pi", "6\\pi", True),
    ("6π", "6\\pi", True),
    ("6 pi", "6\\pi", True),
    ("6*pi", "6\\pi", True),
    ("The area is $6\\pi$.", "6\\pi", True),
    ("The area is 6\\pi.", "6\\pi", True),
    ("The area is $6\\pi$ square units.", "6\\pi", True),
    ("\\{3, 1, 2\\}", "\\{1, 2, 3\\}", True),
    ("{2, 1}", "\\{1, 2\\}", True),
    ("x = 3 or x = -1", "-1, 3", True),
    ("x=-1 and x=3", "3, -1", True),
    ("$x = 2, 3$", "2, 3", True),
    ("2 or 3", "3", False),
    ("7 or 8", "8", False),
    ("I think 7, or maybe 8", "8", False),
    ("1/\\sqrt{2}", "\\frac{\\sqrt{2}}{2}", True),
    ("\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}", True),
    ("3+2\\sqrt{2}", "2\\sqrt{2}+3", True),
    ("3-2\\sqrt{2}", "3+2\\sqrt{2}", False),
    ("1+\\sqrt2", "1+\\sqrt{2}", True),
    ("y = 2x + 1", "2x+1", True),
    ("f(x) = 2x+1", "2x+1", True),
    ("90°", "90", True),
    ("90 degrees", "90^\\circ", True),
    ("\\frac{\\pi}{3}", "\\pi/3", True),
    ("\\frac{2\\pi}{3}", "\\frac{2}{3}\\pi", True),
    ("-\\frac{\\sqrt{3}}{2}", "-\\frac{\\sqrt3}{2}", True),
    ("\\frac{\\sqrt3}2", "\\frac{\\sqrt{3}}{2}", True),
    ("10,000", "10000", True),
    ("10{,}000", "10,000", True),
    ("1,000,000.50", "1000000.5", True),
    ("12,345.67", "12345.66", False),
    ("0.0000002", "0.0000001", False),
    ("1.50", "1.5", True),
    ("007", "7", True),
    ("-0", "0", True),
    ("+5", "5", True),
    ("−3", "-3", True),
    ("3:4", "3:4", True),
    ("3:4", "4:3", False),
    ("\\text{Monday}", "Monday", True),
    ("monday", "Monday", True),
    ("Tuesday", "Monday", False),
    ("no", "yes", False),
    ("\\infty", "∞", True),
    ("infinity", "\\infty", True),
    ("-\\infty", "\\infty", False),
    ("(1,2]", "(1,2)", False),
    ("[0,\\infty)", "[0, \\infty)", True),
    ("\\left[0,1\\right]", "[0,1]", True),
    ("x^2+2x+1", "x^2+1+2x", True),
    ("(x+1)(x+2)", "(x+2)(x+1)", True),
    ("(x+1)(x+3)", "(x+2)(x+1)", False),
    ("2+2", "4", False),
    ("14/2", "7", False),
    ("\\sqrt{16}", "4", False),
    ("2/4", "0.5", False),
    ("2^{10}", "1024", False),
    ("3 + 4 = 7", "7", True),
    ("$3 + 4 = 7$", "7", True),
    ("So 5 * 8 = 40 apples.", "40", True),
    ("\\boxed{8} and then 9", "8", True),
    ("\\boxed{8}, wait, \\boxed{9}", "9", True),
    ("\\boxed{8}, wait, \\boxed{9}", "8", False),
    ("The final answer is: $\\boxed{\\dfrac{3}{7}}$. I hope it is correct.", "3/7", True),
    ("Therefore, the probability is \\(\\frac{5}{36}\\).", "5/36", True),
    ("Therefore, the probability is \\(\\frac{5}{36}\\).", "5/35", False),
    ("**Final Answer**: \\[ \\boxed{17} \\]", "17", True),
    ("Answer: $18", "18", True),
    ("#### 6,250", "6250", True),
    ("#### 6250", "6,250", True),
    ("#### $18", "18", True),
    ("18 dollars a day", "18", True),
    ("It takes 2.5 hours", "2.5", True),
    ("It takes 2.5 hours", "2.5 minutes", False),
    ("2 1/2", "2.5", True),
    ("2\\frac{1}{2}", "\\frac{5}{2}", True),
    ("5 cm", "5 m", False),
    ("25 cm^2", "25 square centimeters", True),
    ("60 km/h", "60 km per hour", True),
    ("4 apples", "4 pears", True),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", True),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}", False),
    ("", "7", False),
    ("I do not know.", "7", False),
    ("one", "1", False),
]
