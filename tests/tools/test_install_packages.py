"""pip's settings as uv takes them."""

from __future__ import annotations

import pytest

from tools.install_packages import variables_of

SETTINGS = """\
:env:.find-links='/wheels'
:env:.default-timeout='180'
global.extra-index-url='https://a.example/simple file:///b/simple'
global.find-links='/others'
user.cert="/certs.pem"
"""


def test_the_environment_comes_before_files_and_what_uv_does_not_need_is_left_out() -> None:
    assert variables_of(SETTINGS) == {
        "UV_FIND_LINKS": "/wheels",
        "UV_INDEX": "https://a.example/simple file:///b/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/certs.pem",
    }


@pytest.mark.parametrize(
    ("line", "variables"),
    [
        ("site.find-links='/a /b'", {"UV_FIND_LINKS": "/a,/b"}),
        ("global.index-url='https://c.example'", {"UV_DEFAULT_INDEX": "https://c.example"}),
        ("install.no-index='true'", {"UV_NO_INDEX": "true"}),
        ("global.constraint='/etc/c.txt'", {"UV_CONSTRAINT": "/etc/c.txt"}),
        ("global.find-links=''", {}),
        ("no settings", {}),
        ("", {}),
    ],
)
def test_each_setting_is_a_variable(line: str, variables: dict[str, str]) -> None:
    assert variables_of(line) == variables
