from __future__ import annotations

import pytest

from lightserve.common.ops import registry
from lightserve.common.ops.registry import Op, op, use_backend


@pytest.fixture(autouse=True)
def _empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "OPS", {})


def declare_double_and_quadruple() -> tuple[Op[[int], int], Op[[int], int]]:
    @op
    def double(x: int) -> int:
        """Twice."""
        return 2 * x

    @op
    def quadruple(x: int) -> int:
        return double(double(x))

    return double, quadruple


def test_an_op_is_its_reference_until_a_backend_is_selected() -> None:
    double, _ = declare_double_and_quadruple()
    double.impl("fast")(lambda x: -x)

    assert double(3) == 6
    assert double.__doc__ == "Twice."


def test_a_coarse_op_uses_the_backend_of_its_parts() -> None:
    double, quadruple = declare_double_and_quadruple()
    double.impl("fast")(lambda x: x + 100)

    use_backend("fast")

    assert quadruple(1) == 201


def test_an_op_that_a_backend_lacks_stays_its_reference() -> None:
    double, quadruple = declare_double_and_quadruple()
    quadruple.impl("fast")(lambda x: -x)

    use_backend("fast")

    assert (double(1), quadruple(1)) == (2, -1)


def test_the_first_backend_that_has_an_op_is_taken() -> None:
    double, quadruple = declare_double_and_quadruple()
    double.impl("fast")(lambda x: -x)
    double.impl("exact")(lambda x: x)
    quadruple.impl("fast")(lambda x: 0)

    use_backend("exact", "fast")

    assert (double(1), quadruple(1)) == (1, 0)


def test_selecting_the_reference_again_undoes_a_backend() -> None:
    double, _ = declare_double_and_quadruple()
    double.impl("fast")(lambda x: -x)

    use_backend("fast")
    use_backend(registry.REFERENCE)

    assert double(3) == 6


def test_an_unknown_backend_is_named() -> None:
    declare_double_and_quadruple()

    with pytest.raises(ValueError, match="'warp'"):
        use_backend("warp")


def test_a_second_implementation_for_a_backend_is_refused() -> None:
    double, _ = declare_double_and_quadruple()
    double.impl("fast")(lambda x: x)

    with pytest.raises(ValueError, match="double already has a fast implementation"):
        double.impl("fast")(lambda x: x)


def test_an_op_declared_twice_is_refused() -> None:
    declare_double_and_quadruple()

    with pytest.raises(ValueError, match="double is declared twice"):
        declare_double_and_quadruple()
