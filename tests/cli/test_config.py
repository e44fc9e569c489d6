"""Settings: what is written is what is read, and what can't be used is said all at once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamd.config import (
    LOG_LEVELS,
    CacheConfig,
    Config,
    ConfigError,
    DaemonConfig,
    FetchConfig,
    PolicyConfig,
    load,
    parse,
    parse_duration,
    parse_size,
)

DISK_BYTES = 1000 * 1000


def read(document: dict[str, object]) -> Config:
    return parse(document, source="test", disk_bytes=lambda _: DISK_BYTES)


def test_an_empty_file_is_the_defaults() -> None:
    assert read({}) == Config()


def test_every_setting_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "streamd.toml"
    path.write_text(
        'log_level = "debug"\nrun_directory = "/r"\nlog_directory = "/l"\nmemory_max_bytes = "1GiB"\n'
        '[cache]\ndirectory = "/c"\nmax_bytes = "10GB"\nreserve_bytes = 4096\nrecent_s = "2h"\n'
        '[fetch]\nbackground_gets = 1\nget_bytes = "1MiB"\nfault_gets = 2\nmax_bytes_per_s = "5MB"\n'
        '[daemon]\ngrace_s = "1m"\nimages_max = 3\nmemory_max_bytes = "4GiB"\nfetch_max_bytes_per_s = 100_000_000\n'
        'worker_user = "1000:1001"\n'
        '[policy]\nevent_after_s = 1\ncredentials_wait_s = "2m"\nhold_s = 0.5\numount_wait_s = "250ms"\n'
    )
    assert load(path) == Config(
        cache=CacheConfig(Path("/c"), 10**10, 4096, 7200.0),
        fetch=FetchConfig(1, 1 << 20, 2, 5_000_000),
        daemon=DaemonConfig(60.0, 3, 4 << 30, 100_000_000, "1000:1001"),
        policy=PolicyConfig(1.0, 120.0, 0.5, 0.25),
        memory_max_bytes=1 << 30,
        log_level="debug",
        run_directory=Path("/r"),
        log_directory=Path("/l"),
    )


def test_the_example_in_the_documentation_is_right() -> None:
    import tomllib

    from streamd import config

    assert config.__doc__
    example = "\n".join(line[4:] for line in config.__doc__.splitlines() if line.startswith("    "))
    document = tomllib.loads(example)
    assert [document["cache"].pop(key) for key in ("max_bytes", "reserve_bytes")] == ["50%", "10%"]  # of this disk
    assert document["daemon"].pop("memory_max_bytes") == "50%"  # of this machine
    assert read(document) == Config()


def test_a_share_is_of_the_disk_that_the_cache_is_on() -> None:
    asked: list[Path] = []

    def disk_bytes(path: Path) -> int:
        asked.append(path)
        return DISK_BYTES

    document = {"cache": {"directory": "/big/cache", "max_bytes": "12.5%"}}
    assert parse(document, source="test", disk_bytes=disk_bytes).cache.max_bytes == 125_000
    assert asked == [Path("/big/cache")]


def test_no_cache_is_no_directory() -> None:
    assert read({"cache": {"enabled": False}}).cache.directory is None


BAD = {
    "unknown key": ({"memory": 3}, "memory: is not a known setting"),
    "unknown key in a table": ({"cache": {"dir": "/c"}}, "cache.dir: is not a known setting"),
    "unknown key in fetch": ({"fetch": {"x": 1}}, "fetch.x: is not a known setting"),
    "unknown key in policy": ({"policy": {"x": 1}}, "policy.x: is not a known setting"),
    "no table": ({"fetch": 3}, "fetch: must be a table"),
    "relative path": ({"cache": {"directory": "cache"}}, "cache.directory: must be an absolute path"),
    "NUL in a path": ({"run_directory": "/a\0b"}, "run_directory: must be an absolute path"),
    "unknown unit": ({"memory_max_bytes": "1G"}, "memory_max_bytes: '1G' is not a size"),
    "too little memory": ({"memory_max_bytes": "1MiB"}, "memory_max_bytes: must be from"),
    "share of what is no disk": ({"memory_max_bytes": "50%"}, "memory_max_bytes: '50%' is not a size"),
    "more than all": ({"cache": {"max_bytes": "101%"}}, "cache.max_bytes: '101%' is not a size or a share"),
    "negative reserve": ({"cache": {"reserve_bytes": -1}}, "cache.reserve_bytes: must be from 0"),
    "negative age": ({"cache": {"recent_s": -3600}}, "cache.recent_s: must be from 0"),
    "truth value as a number": ({"fetch": {"fault_gets": True}}, "fetch.fault_gets: must be a number from 1"),
    "truth value as a size": ({"fetch": {"get_bytes": True}}, "fetch.get_bytes: must be a size"),
    "none at once": ({"fetch": {"background_gets": 0}}, "fetch.background_gets: must be a number from 1"),
    "negative duration": ({"policy": {"hold_s": -1}}, "policy.hold_s: must be from 0"),
    "not a number": ({"policy": {"hold_s": float("nan")}}, "policy.hold_s: must be from 0"),
    "list as a duration": ({"policy": {"hold_s": [1]}}, "policy.hold_s: must be a duration"),
    "unknown level": ({"log_level": "loud"}, "log_level: must be one of debug, info, warning, error"),
    "a rate that is none": ({"daemon": {"fetch_max_bytes_per_s": 1000}}, "daemon.fetch_max_bytes_per_s: must be 0 (no"),
    "a negative rate": ({"fetch": {"max_bytes_per_s": -1}}, "fetch.max_bytes_per_s: must be from 0"),
    "no user": ({"daemon": {"worker_user": "a b"}}, "daemon.worker_user: must be the name of a user, UID:GID"),
    "a number as a user": ({"daemon": {"worker_user": 1000}}, "daemon.worker_user: must be the name of a user"),
    "text as a truth value": ({"cache": {"enabled": "no"}}, "cache.enabled: must be true or false"),
}


@pytest.mark.parametrize(("document", "problem"), BAD.values(), ids=BAD.keys())
def test_a_bad_setting_is_named(document: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(document)
    assert len(refused.value.problems) == 1
    assert refused.value.problems[0].startswith(problem)


def test_all_problems_are_reported_at_once() -> None:
    document: dict[str, object] = {
        "log_level": 3,
        "x": 1,
        "cache": {"y": 1, "max_bytes": "?"},
        "policy": {"hold_s": "?"},
    }
    with pytest.raises(ConfigError) as refused:
        read(document)
    assert sorted(problem.partition(":")[0] for problem in refused.value.problems) == [
        "cache.max_bytes",
        "cache.y",
        "log_level",
        "policy.hold_s",
        "x",
    ]


@pytest.mark.parametrize(("content", "message"), [(b"a = ", "not TOML"), (b"\xff", "not TOML"), (None, "no such file")])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "streamd.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path}: {message}"):
        load(path)


UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_size_is_its_number_times_its_unit(number: int, unit: str, space: str) -> None:
    assert parse_size(f"{number}{space}{unit}") == number * UNITS[unit]
    assert parse_size(f"{number}.5{unit}") == round(number * UNITS[unit] + 0.5 * UNITS[unit])
    assert parse_size(str(number)) == number


@given(
    st.integers(0, 10**6), st.sampled_from([("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)])
)
def test_a_duration_is_its_number_times_its_unit(number: int, unit: tuple[str, int]) -> None:
    assert parse_duration(f"{number}{unit[0]}") == pytest.approx(number * unit[1] / 1000)


@given(st.text())
def test_text_is_a_size_and_a_duration_or_refused_with_a_sentence(text: str) -> None:
    for read_text in (parse_size, parse_duration):
        try:
            assert read_text(text) >= 0
        except ValueError as error:
            assert repr(text) in str(error)  # noqa: PT017


VALUES: st.SearchStrategy[object] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just({})
)
KEYS = st.sampled_from(["log_level", "memory_max_bytes", "run_directory", "cache", "fetch", "policy", "other"])
TABLES = st.dictionaries(
    st.sampled_from(["enabled", "directory", "max_bytes", "get_bytes", "fault_gets", "hold_s", "other"]), VALUES
)


@given(st.dictionaries(KEYS, VALUES | TABLES))
def test_any_document_is_a_configuration_within_its_bounds_or_refused(document: dict[str, object]) -> None:
    try:
        config = read(document)
    except ConfigError:
        return
    assert config.log_level in LOG_LEVELS
    assert config.memory_max_bytes >= 32 << 20
    assert config.run_directory.is_absolute()
    assert 64 << 10 <= config.fetch.get_bytes <= 64 << 20
    assert 0 <= config.policy.hold_s <= 86400
