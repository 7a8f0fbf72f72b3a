"""Phrases of the spoken corpus: of AN4's kinds, drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NAMES = _words("""
AARON ABBOTT ADAMS AGNES ALBERT ALICE ALLEN AMANDA AMBER ANDREW ANGELA ANNA ARNOLD ARTHUR AUSTIN
BAKER BARBARA BARNES BAXTER BETH BOSTON BRADLEY BRENDA BRIAN BROOKS BRUCE BUTLER CALVIN CARL CARMEN
CAROL CARTER CEDAR CHARLES CHESTER CHICAGO CLARA CLARK CLAYTON CINDY CRAIG CRYSTAL CURTIS CYNTHIA
DAISY DALLAS DANIEL DARLENE DAWSON DAYTON DEBORAH DENVER DIANA DIXON DONALD DORIS DOROTHY DOUGLAS
DUNCAN DWIGHT EDGAR EDITH EDWIN ELEANOR ELLIS ELMER EMILY EMMA ERIC ERNEST ERIE ETHEL EUGENE EVANS
FELIX FISHER FLETCHER FLORENCE FORD FORBES FOSTER FRANCES FRANKLIN FRED GAIL GARCIA GARY GEORGE
GERALD GIBSON GILBERT GLADYS GLENN GORDON GRACE GRAHAM GRANT GREG GWEN HANNAH HAROLD HARRIS HARVEY
HAZEL HEIDI HELEN HENRY HERMAN HILL HOLLY HOUSTON HOWARD HUGH HUNTER IRENE IRVING ISABEL IVAN JACK
JACKSON JACOB JAMES JANET JASON JEFFREY JENKINS JEROME JESSICA JILL JOAN JOEL JOHNSON JORDAN JOYCE
JUAN JUDITH JULIA JUSTIN KAREN KATHY KEITH KELLY KENNEDY KEVIN KIM KIRK KNOX KYLE LAMAR LARRY LAURA
LAWRENCE LEONARD LESLIE LEWIS LILLIAN LINDA LISA LLOYD LOGAN LOUIS LUCY LUTHER LYNN MABEL MADISON
MARCUS MARGARET MARION MARK MARTHA MARVIN MASON MAXWELL MEGAN MELVIN MERCER MIAMI MICHAEL MILES
MILDRED MILLER MITCHELL MONICA MORGAN MOSES MURPHY MYRTLE NANCY NAOMI NATHAN NEIL NELSON NEWTON
NICOLE NINA NORMAN OAKLAND OLIVE OLIVER OSCAR OTTO OWEN PAMELA PARKER PATRICK PAULA PAYNE PERRY
PETER PHILLIP PHOENIX PIERCE PORTER POWELL QUENTIN QUINCY RACHEL RALPH RAMSEY RAYMOND REBECCA REED
RHONDA RICHARD RITA ROBIN RODNEY ROGER ROLAND ROSA ROY RUSSELL RUTH SALEM SAMUEL SANDRA SARAH SCOTT
SHARON SHEILA SHELBY SIDNEY SIMON SOPHIE SPENCER STANLEY STELLA STEVEN STUART SUSAN SYLVIA TAMPA
TAYLOR TERESA THELMA THOMAS TIFFANY TIMOTHY TODD TRACY TRENTON TROY TURNER TYLER URSULA VALERIE
VANESSA VAUGHN VERA VERNON VICTOR VIOLA VIRGIL VIVIAN WADE WALLACE WALTER WANDA WARREN WAYNE WEBB
WENDY WESLEY WILBUR WILLIAM WOOD WRIGHT XAVIER YOLANDA YORK YVONNE ZACHARY ZELDA ZOE
""")
_STREETS = _words("""
ASH CEDAR CENTER CHERRY CHURCH ELM FIFTH FOREST GREEN HIGH HILL LAKE MAIN MAPLE MARKET MILL OAK
PARK PINE RIVER SECOND SOUTH SPRING WALNUT
""")
_WAYS = ("STREET", "AVENUE", "ROAD", "DRIVE")
_MONTHS = _words("""
JANUARY FEBRUARY MARCH APRIL MAY JUNE JULY AUGUST SEPTEMBER OCTOBER NOVEMBER DECEMBER
""")
COMMANDS = ("ENTER", "ERASE", "GO", "HELP", "NO", "REPEAT", "RUBOUT", "START", "STOP", "YES")
_ONES = _words("""
ZERO ONE TWO THREE FOUR FIVE SIX SEVEN EIGHT NINE TEN ELEVEN TWELVE THIRTEEN FOURTEEN FIFTEEN
SIXTEEN SEVENTEEN EIGHTEEN NINETEEN
""")
_TENS = _words("TWENTY THIRTY FORTY FIFTY SIXTY SEVENTY EIGHTY NINETY")
_DIGITS = (*_ONES[:10], "OH")


def phrase(random: Random) -> str:
    """One of AN4's kinds of utterances."""
    share = random.random()
    for weight, kind in _KINDS:
        share -= weight
        if share < 0:
            return kind(random)
    return _name(random)  # the weights add up to 1, except for rounding


def below(random: Random, limit: int) -> int:
    """Python promises to keep the sequence of `random()`, and of no other method."""
    return int(random.random() * limit)


def pick(random: Random, choices: Sequence[str]) -> str:
    return choices[below(random, len(choices))]


def _name(random: Random) -> str:
    return " ".join(pick(random, _NAMES))


def _digits(random: Random) -> str:
    return " ".join(pick(random, _DIGITS) for _ in range(3 + below(random, 4)))


def _number(random: Random) -> str:
    """As people say house numbers: ONE FIFTY, TWO HUNDRED SIX, EIGHTY THREE."""
    ones, rest = _ONES[1 + below(random, 9)], _spell(2 + below(random, 98))
    return (rest, f"{ones} {rest}", f"{ones} HUNDRED {rest}")[below(random, 3)]


def _date(random: Random) -> str:
    month, day = below(random, 12), _spell(1 + below(random, 31))
    year = _spell(30 + below(random, 70))
    if random.random() < 0.4:
        return f"{_spell(month + 1)} {day} {year}"
    century = "NINETEEN " if random.random() < 0.5 else ""
    return f"{_MONTHS[month]} {day} {century}{year}"


def _command(random: Random) -> str:
    """ENTER NINE TWO EIGHT, RUBOUT G M E F THIRTY NINE."""
    if random.random() < 0.4:
        return f"ENTER {_number(random) if random.random() < 0.5 else _digits(random)}"
    letters = " ".join(chr(65 + below(random, 26)) for _ in range(2 + below(random, 4)))
    verb = ("ERASE ", "RUBOUT ", "")[below(random, 3)]
    return f"{verb}{letters} {_spell(1 + below(random, 99))}"


def _control(random: Random) -> str:
    return pick(random, COMMANDS)


def _address(random: Random) -> str:
    return f"{_number(random)} {pick(random, _STREETS)} {pick(random, _WAYS)}"


_KINDS: tuple[tuple[float, Callable[[Random], str]], ...] = (
    (0.32, _name),
    (0.16, _digits),
    (0.10, _number),
    (0.13, _date),
    (0.16, _command),
    (0.07, _control),
    (0.06, _address),
)


def _spell(number: int) -> str:
    """From 0 to 99, in words."""
    if number < 20:
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f" {_ONES[ones]}" if ones else "")
