"""What the agent does on a node: saves, restores and harvests of sandboxes.

Entry points
- a save: `checkpoint.Saver` walks the course of a `jobs.Job` (`course.py`, pure) with a `sandbox.RunscSandbox`;
  `Saver.recover` is the first thing in an agent's life
- a save that the application asks for: `workload_trigger.armed_annotations` at create, `workload_trigger.await_written`
- a restore: `restore_check.refusals` (pure) before the Restore RPC, `restore_records.RestoreRecords` around it,
  `restore.observe` after it
- GPUs: `gpu.read_gpus`, `gpu.preflight` (pure)

Invariants
- No pod is left paused, and no partial image, by whatever fails, is cancelled or dies; what can't be undone at once is
  noted on disk and undone by the next round.
- A pod that is to stop is paused before its save and ended once its image is whole and on the disk: nothing runs
  twice.
- No restore is tried twice for a pod; any doubt before the Restore RPC is a cold start with its reason.
- What changes a sandbox goes by runsc's command line, what waits by its control socket. Threads run runsc, the disk and
  pushes; all state is the Trio thread's.
"""
