"""Settings of the worker that come as lists."""

import pytest

from config.settings import Role, load_settings
from marq.core.errors import ConfigError


def test_a_worker_has_all_roles_unless_told() -> None:
    assert load_settings().roles == set(Role)


def test_roles_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_ROLES", " web,tracker ,")

    assert load_settings().roles == {Role.WEB, Role.TRACKER}


@pytest.mark.parametrize("roles", ["", " , ", "trackr", "web,trackr"])
def test_an_unknown_role_or_none_at_all_is_refused_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, roles: str
) -> None:
    monkeypatch.setenv("MARQ_ROLES", roles)

    with pytest.raises(ConfigError, match=r"MARQ_ROLES: expected one or more of tracker, handlers, web.*found"):
        load_settings()


def test_modules_of_handlers_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_HANDLERS", "services.emails, services.reports,services.emails")

    assert load_settings().handlers == ("services.emails", "services.reports")


def test_what_can_not_be_a_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_HANDLERS", "services.emails:send")

    with pytest.raises(ConfigError, match="MARQ_HANDLERS: expected names of modules.*'services.emails:send' is none"):
        load_settings()
