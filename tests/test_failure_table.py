"""Which test shows which kind of failure: what users of lazy-loading daemons reported, row by row.

The ids are those of the project's catalogue of public issues (sections 2 to 6: hangs, damaged bytes, store and
credentials, priority and prefetch, resources); each text says the row's symptom or what is expected, in short. A row is
an example of a kind: the tests that are named show the kind. Rows that are not about the process that serves a mount,
or not possible in it, say why. The test at the end keeps the names true.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Shown:
    """A row that tests show; `tests` are `file::function`, the file relative to `tests`."""

    symptom: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NotHere:
    """A row that no test of the serving process shows, and why not."""

    symptom: str
    reason: str


_STORE, _CACHE, _ENDING = "fuse/test_store_faults.py::", "fuse/test_cache_faults.py::", "fuse/test_ending.py::"
_SERVING, _KERNEL = "fuse/test_serving.py::", "fuse/test_failure_kinds.py::"
_KINDS, _IMAGE, _NODE = "serve/test_failure_kinds.py::", "serve/test_image.py::", "serve/test_node_cache.py::"
_GOOGLE = "store/test_google.py::"
_ONCE = _KINDS + "test_a_fault_at_any_request_costs_a_request_and_no_read"
_OUTAGE = _KINDS + "test_an_outage_is_waited_for_is_not_hammered_and_is_over_when_it_is_over"
_SAVING = "saving: see tests/save"
_CHAOS = "stress/test_chaos.py::test_chaos_gives_right_bytes_or_what_the_policy_says"

ROWS: dict[str, Shown | NotHere] = {
    # 2 Hangs
    "B1": Shown(
        "unmount hangs while reads wait",
        (
            _ENDING + "test_an_unmount_with_128_reads_waiting_is_refused_and_names_who_waits",
            _ENDING + "test_a_forced_unmount_ends_128_waiting_reads_with_eio_and_the_process",
            _ENDING + "test_signals_end_a_mount_within_a_bound_while_the_store_hangs",
        ),
    ),
    "B2": Shown(
        "an abort of the connection does not end the server",
        (_KERNEL + "test_a_connection_that_somebody_aborts_ends_its_reads_and_its_process",),
    ),
    "B3": Shown("close waits for I/O", (_ENDING + "test_closing_a_file_does_not_wait_for_a_server_that_is_stopped",)),
    "B4": NotHere("a notification at teardown deadlocks", "nothing is ever notified: what is mounted never changes"),
    "B5": NotHere("a notification from a handler deadlocks", "nothing is ever notified: what is mounted never changes"),
    "B7": Shown(
        "a full cache disk stops everything", (_CACHE + "test_a_full_cache_disk_ends_caching_and_nothing_else",)
    ),
    "B8": Shown(
        "a faulty cache disk stops everything",
        (
            _CACHE + "test_a_disk_that_fails_writes_ends_caching_and_slows_nobody",
            _CACHE + "test_a_disk_that_fails_reads_costs_a_fetch_and_slows_nobody_for_long",
            _CACHE + "test_a_disk_that_hangs_before_the_mount_is_done_without",
        ),
    ),
    "B9": NotHere(
        "memory reclaim waits for the file system's own process",
        "a mount is read-only, so it has no dirty pages for reclaim to write through it",
    ),
    "B10": Shown(
        "writing through a mapping waits for itself; here it is refused",
        (_SERVING + "test_a_mount_shows_three_read_only_files_of_root_and_nothing_else",),
    ),
    "B11": Shown(
        "a memory limit below one read's need hangs it",
        (
            _IMAGE + "test_every_byte_is_right_however_little_room_there_is",
            "serve/test_scheduler.py::test_every_wait_ends_and_all_memory_is_given_back",
        ),
    ),
    "B13": Shown(
        "errors are classed case by case, or retried in a tight loop",
        (
            "serve/test_policy.py::test_every_kind_has_a_course",
            _GOOGLE + "test_the_table_classes_every_status",
            _OUTAGE,
            _KINDS + "test_whatever_error_a_call_of_the_cache_gives_no_reader_hears_of_it",
        ),
    ),
    "B15": Shown(
        "a failed load is reported to nobody",
        (_KERNEL + "test_a_read_that_fails_is_seen_by_whoever_asks_for_the_status",),
    ),
    "B16": Shown(
        "a signal interrupts a read",
        (
            _KERNEL + "test_a_signal_every_millisecond_interrupts_no_read_however_the_file_is_opened",
            _SERVING + "test_signals_every_millisecond_are_never_seen_as_an_error",
        ),
    ),
    "B17": Shown(
        "the kernel's own limit for a request ends the whole mount",
        (_KERNEL + "test_the_policy_acts_before_a_kernel_that_limits_requests_ends_the_whole_mount",),
    ),
    # 3 Wrong or damaged bytes
    "C1": Shown(
        "another layout, or other bytes, are taken for those that are mounted",
        (
            _STORE + "test_a_pack_that_changes_under_a_mount_gives_no_wrong_byte_and_fails_no_other_read",
            _NODE + "test_images_of_different_sources_share_no_byte",
        ),
    ),
    "C3": Shown(
        "bit rot in the cache goes unnoticed",
        (
            _CACHE + "test_a_flipped_bit_in_a_cached_chunk_costs_one_fetch_of_it",
            _NODE + "test_a_flipped_bit_in_the_cache_is_never_served_and_is_fetched_again",
        ),
    ),
    "C5": Shown(
        "a damaged cache file fails again and again",
        (_CACHE + "test_a_damaged_cache_gives_right_bytes", _STORE + "test_what_passes_is_waited_for"),
    ),
    "C6": Shown(
        "what a crash left half written is taken for whole",
        (
            _CACHE + "test_a_damaged_cache_gives_right_bytes",
            _NODE + "test_what_the_disk_has_not_confirmed_is_never_read_from_it",
        ),
    ),
    "C8": Shown(
        "a restart fetches everything again",
        (
            _ENDING + "test_kill_9_in_the_middle_of_a_load_costs_only_what_was_not_there_yet",
            _ENDING + "test_after_kill_9_the_next_mount_cleans_up_and_fetches_nothing_again",
        ),
    ),
    "C9": Shown(
        "another version's cache is misread",
        (
            _CACHE + "test_a_damaged_cache_gives_right_bytes",
            _NODE + "test_a_directory_that_is_not_understood_is_begun_anew",
        ),
    ),
    "C10": Shown(
        "an assertion on the way of a read, a wrong index",
        (
            "serve/test_plan.py::test_the_chunks_of_a_range_are_those_that_share_a_byte_with_it",
            "serve/test_plan.py::test_a_plan_is_whole_wanted_frames_back_to_back_within_its_bounds",
            _SERVING + "test_every_range_has_the_bytes_that_were_pushed",
        ),
    ),
    "C11": Shown(
        "a prefetch that fails fails the read that joined it",
        (_ONCE, _IMAGE + "test_a_shared_fetch_that_fails_ahead_does_not_fail_the_read_that_joined_it"),
    ),
    "C12": Shown(
        "what can't be reached is taken for absent, and reads as nothing",
        (
            _STORE + "test_an_outage_is_waited_for_while_everything_else_answers",
            _STORE + "test_a_name_that_does_not_resolve_is_waited_for",
            _STORE + "test_what_does_not_pass_fails_the_reads_after_the_hold",
            _STORE + "test_a_pack_that_changes_under_a_mount_fails_its_reads",
        ),
    ),
    "C14": Shown(
        "an object that is overwritten gives a mixture",
        (
            _STORE + "test_a_pack_that_changes_under_a_mount_fails_its_reads",
            _STORE + "test_a_pack_that_changes_under_a_mount_gives_no_wrong_byte_and_fails_no_other_read",
            "store/test_contract.py::test_a_pinned_read_of_a_replaced_object_is_changed_and_of_a_deleted_one_gone",
        ),
    ),
    "C15": Shown(
        "another page size ends files early; here no size is rounded to pages",
        (_SERVING + "test_every_range_has_the_bytes_that_were_pushed",),
    ),
    "C16": Shown(
        "the first look finds a placeholder size",
        (_KERNEL + "test_the_first_look_and_the_first_read_find_the_whole_file",),
    ),
    "C17": Shown(
        "a body that ends early, or is too long, is taken as it is",
        (
            _ONCE,
            _GOOGLE + "test_a_body_that_ends_early_gives_what_came_and_then_is_transient",
            _GOOGLE + "test_a_body_that_is_too_long_is_cut",
            _STORE + "test_what_passes_is_waited_for",
        ),
    ),
    "C19": Shown(
        "the emulator differs from the store that it stands for",
        (
            "store/test_contract.py::test_any_range_is_read_exactly",
            _GOOGLE + "test_a_read_asks_for_its_range_and_generation",
        ),
    ),
    "C20": Shown(
        "a size that somebody claims spoils what is stored under it",
        (
            "fuse/test_bad_input.py::test_a_bad_manifest_is_refused_by_name_and_nothing_is_mounted",
            "store/test_catalog.py::test_what_does_not_add_up_is_damaged_by_name_and_hides_no_other_snapshot",
        ),
    ),
    "C21": Shown(
        "who is served can change what is cached",
        (_SERVING + "test_a_mount_shows_three_read_only_files_of_root_and_nothing_else",),
    ),
    "C22": Shown(
        "files of different saves are mixed",
        (
            "fuse/test_bad_input.py::test_a_bad_image_is_refused_before_anything_is_stored",
            "fuse/test_bad_input.py::test_a_bad_manifest_is_refused_by_name_and_nothing_is_mounted",
        ),
    ),
    # 4 Object store, credentials, time
    "D1": Shown(
        "a token runs out in the middle of a load",
        (
            _ONCE,
            _GOOGLE + "test_both_clients_send_the_token_of_one_provider_and_take_the_next_when_it_runs_out",
            _KINDS + "test_credentials_that_are_refused_for_good_fail_the_reads_after_their_time",
        ),
    ),
    "D3": NotHere(
        "a thousand pods ask the metadata server at once", "one process serves a snapshot's pods, with one token"
    ),
    "D4": Shown(
        "a mount that meets a throttled token server is not tried again",
        (_GOOGLE + "test_no_token_to_be_had_is_credentials_and_an_unreachable_giver_of_them_transient",),
    ),
    "D5": Shown(
        "many reads that are refused refresh the token many times",
        (
            _GOOGLE + "test_many_reads_refused_at_once_share_one_refresh",
            _GOOGLE + "test_a_refused_token_is_not_used_again",
        ),
    ),
    "D6": Shown(
        "one slow answer kills a sandbox",
        (
            _KINDS + "test_one_answer_that_takes_40_s_holds_up_no_read_for_long",
            _STORE + "test_a_connection_that_says_nothing_is_given_up_and_another_one_asked",
        ),
    ),
    "D7": Shown(
        "too many requests fail, or end in too few",
        (
            _KINDS + "test_a_store_that_refuses_more_than_so_many_requests_a_second_is_used_at_four_fifths_of_them",
            _ONCE,
        ),
    ),
    "D8": NotHere("an upload waits too long on 503", _SAVING),
    "D9": Shown(
        "a herd of readers fetches everything each",
        (
            _KINDS + "test_a_hundred_readers_cost_one_fetch_of_everything",
            _KERNEL + "test_many_readers_one_after_another_and_at_once_cost_one_fetch",
            _ENDING + "test_a_second_mount_of_a_snapshot_on_one_cache_is_refused_and_told_where_the_first_is",
        ),
    ),
    "D11": Shown(
        "what was signed when it was queued is stale when it is sent; here a request takes its token when it is sent",
        (_GOOGLE + "test_both_clients_send_the_token_of_one_provider_and_take_the_next_when_it_runs_out",),
    ),
    "D12": Shown(
        "what can't succeed is tried again and again",
        (
            _KINDS + "test_an_answer_that_stays_is_asked_for_as_often_as_the_policy_says_and_ends_the_read_then",
            _KINDS + "test_what_nobody_waits_for_and_cannot_be_had_is_asked_for_once_and_again_when_it_is_read",
            _GOOGLE + "test_each_call_asks_once_and_classes_the_answer_by_the_table",
        ),
    ),
    "D13": NotHere("a partial upload stays for ever", _SAVING),
    "D14": NotHere("composite uploads leave folders", _SAVING),
    "D15": NotHere("inotify does not see remote changes", "what is mounted never changes"),
    # 5 Priority, prefetch, performance
    "E1": Shown(
        "a prefetch starves faults, or keeps one that joins it waiting",
        (
            _KINDS + "test_faults_wait_little_longer_while_everything_else_is_fetched",
            _IMAGE + "test_a_fault_is_fetched_before_the_stream_that_waits",
        ),
    ),
    "E2": Shown(
        "where a prefetch is interrupted is unclear",
        (
            _KINDS + "test_a_fault_in_the_middle_of_a_prefetch_is_the_next_request_of_the_store",
            "serve/test_scheduler.py::test_a_fault_goes_before_the_stream_and_the_stream_before_what_nobody_asked_for",
        ),
    ),
    "E3": Shown(
        "read and prefetch fetch the same bytes twice",
        (
            _ONCE,
            _IMAGE + "test_two_readers_of_everything_cost_one_fetch_of_everything",
            _SERVING + "test_two_readers_of_everything_cost_one_fetch_of_everything",
        ),
    ),
    "E4": Shown(
        "a prefetch outlives its mount",
        (_KERNEL + "test_an_unmount_in_the_beginning_of_a_load_is_immediate",),
    ),
    "E6": Shown("reads arrive in small parts", (_KERNEL + "test_a_read_of_256_kib_is_one_request",)),
    "E7": NotHere("a warm node is slow with direct I/O", "a measurement: bench, no test asserts a time"),
    "E8": NotHere("a lazy start is slower than a plain copy", "a measurement: bench, no test asserts a time"),
    "E9": Shown(
        "everything is loaded although only a part is wanted",
        (_SERVING + "test_without_prefetch_only_what_is_read_is_fetched",),
    ),
    "E10": Shown(
        "the server ends after one restore",
        (
            _KERNEL + "test_many_readers_one_after_another_and_at_once_cost_one_fetch",
            "e2e/test_restore.py::test_two_restores_at_once_from_one_mount_fetch_the_snapshot_once",
        ),
    ),
    "E11": Shown(
        "two images evict each other in turns",
        ("serve/test_cache_policy.py::test_two_images_that_do_not_both_fit_do_not_evict_each_other_in_turns",),
    ),
    "E12": Shown(
        "EAGAIN again and again",
        (_KINDS + "test_whatever_error_a_call_of_the_cache_gives_no_reader_hears_of_it",),
    ),
    "E14": Shown(
        "a slow read fails at its end, when attributes are asked for by the handle",
        (
            _KERNEL + "test_a_slow_read_to_the_end_and_past_it_is_right_and_attributes_agree",
            "fuse/test_mounting.py::test_the_mount_is_what_was_asked_for",
        ),
    ),
    # 6 Resources
    "F2": Shown(
        "memory has no limit",
        (_KERNEL + "test_the_least_limit_serves_128_slots_and_is_kept", _CHAOS),
    ),
    "F3": Shown(
        "the limit leaves buffers out",
        (
            _KERNEL + "test_the_least_limit_serves_128_slots_and_is_kept",
            _IMAGE + "test_memory_is_given_back_and_the_cap_is_kept",
        ),
    ),
    "F4": Shown(
        "at the limit reads fail",
        (_KERNEL + "test_the_least_limit_serves_128_slots_and_is_kept",),
    ),
    "F5": Shown(
        "idle memory is kept",
        (
            _KERNEL + "test_memory_is_returned_when_a_load_is_over",
            "stress/test_long.py::test_a_mount_that_serves_many_loads_on_bad_days_grows_by_nothing",
        ),
    ),
    "F6": Shown(
        "a full cache disk reaches the reader",
        (
            _CACHE + "test_a_full_cache_disk_ends_caching_and_nothing_else",
            _KINDS + "test_whatever_error_a_call_of_the_cache_gives_no_reader_hears_of_it",
        ),
    ),
    "F8": Shown(
        "nothing is evicted, nothing can be cleared",
        (
            _NODE + "test_idle_images_leave_for_a_new_one_and_used_ones_stay",
            _NODE + "test_a_limit_smaller_than_the_image_bounds_what_is_written",
            _CHAOS,
        ),
    ),
    "F9": Shown(
        "a disk that others fill evicts live images",
        ("serve/test_cache_policy.py::test_a_disk_that_others_fill_costs_the_newcomer_room_and_no_live_image",),
    ),
    "F10": Shown(
        "an image that is needed later is evicted while it is idle",
        ("serve/test_cache_policy.py::test_an_idle_pinned_image_stays_for_as_long_as_it_is_pinned",),
    ),
    "F11": Shown(
        "a senseless setting makes everything go, or a flush hits who reads",
        (
            "cli/test_config.py::test_any_document_is_a_configuration_within_its_bounds_or_refused",
            _NODE + "test_a_second_owner_is_refused_and_told_who_has_it",
        ),
    ),
    "F13": Shown(
        "each restore downloads the snapshot anew",
        (_KERNEL + "test_many_readers_one_after_another_and_at_once_cost_one_fetch",),
    ),
    "F14": Shown("nobody says what state it is in", ("cli/test_control.py::test_status_comes_as_it_was_said",)),
}


@cache
def _functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("row", ROWS)
def test_what_the_table_names_is_there(row: str) -> None:
    entry = ROWS[row]
    if isinstance(entry, NotHere):
        assert entry.reason
        return
    assert entry.tests
    for test in entry.tests:
        file, _, name = test.partition("::")
        assert name in _functions(TESTS / file), test
