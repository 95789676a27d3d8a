"""Errors that pass through libraries which lose their type."""

import pytest

from scone import errors
from scone.errors import CorruptArtifactError, SconeError, error_from_dict


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SconeError)]
)
def test_every_error_comes_back_from_its_description(kind: type[SconeError]) -> None:
    error = error_from_dict(kind("the table at x is too small").to_dict())
    assert (type(error), str(error)) == (kind, "the table at x is too small")


def test_errors_defined_elsewhere_come_back_too() -> None:
    class StrangeError(CorruptArtifactError):
        pass

    assert isinstance(error_from_dict(StrangeError("odd").to_dict()), StrangeError)
