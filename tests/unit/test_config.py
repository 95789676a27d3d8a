import pytest

from scone.config import Config, apply_overrides, build_config, parse_toml
from scone.errors import ConfigError


class Inner(Config):
    num_fgrams: int = 10
    path: str = ""


class Outer(Config):
    name: str
    count: Inner = Inner()


def test_overrides_are_toml_values_or_else_plain_strings():
    settings = apply_overrides({"count": {"num_fgrams": 1}}, ["count.num_fgrams=5", "count.path=s3://b/x", "name=a"])
    assert settings == {"count": {"num_fgrams": 5, "path": "s3://b/x"}, "name": "a"}


def test_overrides_leave_the_given_settings_untouched():
    given = {"count": {"num_fgrams": 1}}
    apply_overrides(given, ["count.num_fgrams=5"])
    assert given == {"count": {"num_fgrams": 1}}


@pytest.mark.parametrize("override", ["count.num_fgrams", "=3", "count..x=3"])
def test_override_without_key_and_value_is_refused(override):
    with pytest.raises(ConfigError, match=r"expected section\.key=value"):
        apply_overrides({}, [override])


def test_override_below_a_value_is_refused():
    with pytest.raises(ConfigError, match="name is a value, not a section"):
        apply_overrides({"name": "x"}, ["name.y=1"])


def test_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown setting run\.count\.num_fgram: did you mean num_fgrams\?"):
        build_config(Outer, {"name": "a", "count": {"num_fgram": 3}}, "run")


def test_unknown_key_without_a_near_one_lists_the_known():
    with pytest.raises(ConfigError, match="known keys: count, name"):
        build_config(Outer, {"name": "a", "zzz": 3})


def test_every_problem_is_listed():
    with pytest.raises(ConfigError) as raised:
        build_config(Outer, {"count": {"num_fgrams": "many"}})
    assert "name is required and was not given" in str(raised.value)
    assert "count.num_fgrams: Input should be a valid integer" in str(raised.value)
    assert "(got 'many')" in str(raised.value)


def test_broken_toml_names_file_and_line():
    with pytest.raises(ConfigError, match=r"my\.toml is not valid TOML: .*line 2"):
        parse_toml("a = 1\nb = = 2", "my.toml")


def test_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Inner().num_fgrams = 3
