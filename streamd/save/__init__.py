"""Save: an image directory becomes a snapshot in a store, is copied back, checked and removed.

Entry points: `push.push`, `pull.pull`, `verify.verify`, `lifecycle.remove`, `lifecycle.collect`,
`image_dir.check_image_dir`. Plain threads, no Trio. `snapshot` says what is written, `store` writes it; nothing here
retries, the caller's store does.

Invariants
- The manifest is put last, and only when nothing is in its place; a snapshot exists when and only when it does.
- A push touches its own `packs/PUSH-ID/` and the manifest, nothing else, and never removes what a manifest points to.
- `lifecycle` is the only one that removes what it did not write, by the rules in its text; a model test runs
  pushes, collection and removal through each other (tests/save/test_model.py).
- Memory is bounded whatever the image's size; `push.py` says by what.
"""
