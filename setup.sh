#!/bin/sh
# Set up everything that the Makefile's targets need, on Debian 12, Ubuntu 24.04 or newer, as root. The second run looks.
#
#   ./setup.sh          system packages, .venv (from requirements/, hash-locked), .tools/runsc
#   ./setup.sh test     and what the tests need beside that
#   ./setup.sh bench    and what the benchmarks compare with
#
# What it makes: .venv/ and .tools/. `.tools/runsc` is a link to the runsc that is used: $RUNSC or the one on PATH when
# it is new enough (has `restore --background`), else the pinned one. Whatever is missing and can't be had ends with
# one line that says so.
set -eu
cd "$(dirname "$0")"

RUNSC_MODULE=gvisor.dev/gvisor/runsc@v0.0.0-20260905035102-160fafc42237
RUNSC_GO=1.26.3 # what that module's go.mod asks for
# The first official release after that commit, at the address that gVisor documents for a specific release
# (g3doc/user_guide/install.md); should it be gone, the latest one.
RUNSC_RELEASES="20260907 latest"
RELEASE_URL=https://storage.googleapis.com/gvisor/releases/release
# What the race has beside Debian's packages, where there is Go to build it.
GCSFUSE_MODULE=github.com/googlecloudplatform/gcsfuse/v3@v3.8.4

die() {
    echo "setup: $*" >&2
    exit 1
}
say() { echo "setup: $*" >&2; }

[ "$(uname -s)" = Linux ] || die "needs Linux; this is $(uname -s)"
case "$(uname -m)" in
x86_64 | aarch64) ;;
*) die "gVisor runs on x86_64 and aarch64; this is $(uname -m)" ;;
esac
[ "$(id -u)" = 0 ] || die "needs root: sandboxes and mounts do (run it with sudo)"
[ -c /dev/fuse ] || die "/dev/fuse is missing: load the kernel module (modprobe fuse), or give the container the device (--device /dev/fuse)"

mkdir -p .tools
exec 9>.tools/lock
flock 9 # two `make` at a time: one sets up, the other waits

# --- System packages ---

PACKAGES="ca-certificates fuse3 gcc libc6-dev libfuse3-dev pkg-config"
PYTHON_PACKAGES="python3 python3-dev python3-venv"
# A network namespace for slow links, a real systemd for the daemon's unit, a real containerd (with ctr and runc's shim)
# and what makes images for it.
TEST_PACKAGES="containerd iproute2 runc systemd umoci util-linux"
BENCH_PACKAGES="curl fio iproute2 rclone util-linux zstd"

installed() { # all of the named packages are
    dpkg-query -W -f '${db:Status-Status}\n' "$@" 2>/dev/null | grep -cx installed | grep -qx $#
}

install() {
    command -v apt-get >/dev/null || die "needs $*, and there is no apt-get: this is made for Debian 12 and Ubuntu 24.04"
    say "installing $*"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >&2 || say "apt-get update failed; trying with the package lists that are there"
    apt-get install -y -qq --no-install-recommends "$@" >&2 || die "apt-get could not install $* (above); is the network there?"
}

# shellcheck disable=SC2086 # lists are split on purpose
if command -v dpkg-query >/dev/null; then
    installed $PACKAGES || install $PACKAGES
    [ "${1:-}" != test ] || installed $TEST_PACKAGES || install $TEST_PACKAGES
    [ "${1:-}" != bench ] || installed $BENCH_PACKAGES || install $BENCH_PACKAGES
else
    pkg-config --exists fuse3 2>/dev/null && command -v gcc fusermount3 >/dev/null ||
        die "needs libfuse 3 with its headers, fusermount3, pkg-config and gcc; only Debian and Ubuntu get them from here"
fi

# --- Python ---

# The interpreter's own file: what is on PATH may be a shim that starts a shell for each call.
python_file() {
    "$1" -I -c '
import os, sys, sysconfig
import ensurepip, venv
fit = sys.version_info >= (3, 11) and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
print(os.path.realpath(getattr(sys, "_base_executable", sys.executable))) if fit else sys.exit(1)' 2>/dev/null
}

find_python() {
    for name in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do
        python_file "$name" && return
    done
    return 1
}

# What the environment was made from. Looked at on every run, so cheap: no interpreter is started.
environment_key() { cat setup.sh pyproject.toml requirements/build.txt requirements/dev.txt | sha256sum; }

make_environment() {
    unset PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME VIRTUAL_ENV
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_WARN_SCRIPT_LOCATION=1
    if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
        # shellcheck disable=SC2086
        python=$(find_python) || { install $PYTHON_PACKAGES && python=$(find_python); } ||
            die "needs Python 3.11 or newer with its headers and venv (set PYTHON=/path/to/python3 to choose one)"
        say "making .venv with $python"
        "$python" -m venv --clear .venv || die "could not make .venv with $python"
    fi
    say "installing Python packages into .venv (pyfuse3 is compiled: 1-2 minutes, once)"
    pip="nice .venv/bin/python -m pip install --quiet"
    # What builds source distributions comes first, so that nothing unpinned is fetched to build one.
    for step in \
        "--require-hashes -r requirements/build.txt" \
        "--require-hashes --no-build-isolation -r requirements/dev.txt" \
        "--no-deps --no-build-isolation --editable ."; do
        # shellcheck disable=SC2086
        $pip $step >&2 || die "pip install $step failed (above); is the network there?"
    done
    # Commands start two to three times faster; a compile error in some package's file for another Python is not ours.
    .venv/bin/python -m compileall -q -j 0 .venv/lib streamd agent bench >/dev/null 2>&1 || true
}

key=$(environment_key)
if [ "$(cat .venv/made-from 2>/dev/null)" != "$key" ] || ! [ -x .venv/bin/streamd ]; then
    rm -f .venv/made-from
    make_environment
    echo "$key" >.venv/made-from
fi

# The OCI runtime that stands before runsc is C; it finds its Python part where that is now.
if ! [ .venv/bin/streamd-runsc -nt agent/wrapper/front.c ] || ! [ .venv/bin/streamd-runsc -nt .venv/made-from ]; then
    .venv/bin/python -m agent.wrapper.building .venv/bin/streamd-runsc || die "streamd-runsc could not be built (above)"
fi

# --- runsc ---

# New enough, and static: a runsc that was built with cgo can't start itself again inside its chroot.
usable() {
    [ -x "$1" ] && "$1" help restore 2>&1 | grep -q -e -background && ! ldd "$1" >/dev/null 2>&1
}

at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; } # at_least WANTED FOUND

has_go() { # sets version
    PATH=$PATH:/usr/local/go/bin
    command -v go >/dev/null || return 1
    version=$(go env GOVERSION 2>/dev/null | sed 's/^go//; s/[^0-9.].*//')
    # From 1.21 on Go fetches a newer Go when a module asks for one; below (Debian 12: 1.19) it counts as none.
    at_least 1.21 "${version:-0}"
}

go_install() { GOBIN=$PWD/.tools/bin GOFLAGS= CGO_ENABLED=0 nice go install "$1" >&2; }

build_runsc() {
    has_go || return 1
    say "building runsc with Go $version (2-5 minutes, once)"
    at_least $RUNSC_GO "$version" || export GOTOOLCHAIN="go$RUNSC_GO"
    go_install $RUNSC_MODULE
}

# The release's archive, because a runsc of 2026 wants the programs beside it (gvisor-bin/), and its SHA-512.
download_runsc() {
    for release in $RUNSC_RELEASES; do
        url=$RELEASE_URL/$release/$(uname -m)/gvisor.tar.bz2
        say "downloading $url"
        .venv/bin/python - "$url" .tools/bin <<'PYTHON' >&2 && return
import hashlib, os, shutil, sys, tarfile, tempfile, urllib.request

url, directory = sys.argv[1:]
os.makedirs(directory, exist_ok=True)
try:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        archive = os.path.join(scratch, "gvisor.tar.bz2")
        wanted = urllib.request.urlopen(url + ".sha512", timeout=60).read().split()[0].decode().lower()
        with urllib.request.urlopen(url, timeout=60) as body, open(archive, "wb") as file:
            shutil.copyfileobj(body, file, 1 << 20)
        with open(archive, "rb") as file:
            found = hashlib.file_digest(file, "sha512").hexdigest()
        if found != wanted:
            sys.exit(f"  its SHA-512 is {found}, not {wanted}")
        os.mkdir(os.path.join(scratch, "gvisor-bin"))
        with tarfile.open(archive) as tar:
            for member in tar:
                name = os.path.normpath(member.name).lstrip("/")
                if member.isfile() and (name == "runsc" or os.path.dirname(name) == "gvisor-bin"):
                    with open(os.path.join(scratch, name), "wb") as file:
                        shutil.copyfileobj(tar.extractfile(member), file, 1 << 20)
                    os.chmod(file.name, 0o755)
        shutil.rmtree(os.path.join(directory, "gvisor-bin"), ignore_errors=True)
        for name in ("gvisor-bin", "runsc"):
            os.replace(os.path.join(scratch, name), os.path.join(directory, name))
except (OSError, tarfile.TarError, IndexError) as error:
    sys.exit(f"  {error}")
PYTHON
    done
    return 1
}

choose_runsc() {
    for found in "${RUNSC:-}" "$(command -v runsc || true)" .tools/bin/runsc; do
        [ -n "$found" ] || continue
        if usable "$found"; then
            runsc=$(readlink -f "$found")
            return
        fi
        [ "$found" != "${RUNSC:-}" ] || say "RUNSC=$found is not used: not a static runsc with restore --background"
    done
    { build_runsc || download_runsc; } && usable .tools/bin/runsc && runsc=$PWD/.tools/bin/runsc
}

choose_runsc ||
    die "no runsc: \$RUNSC and PATH have none with restore --background, and neither go install nor the download worked; is the network there?"
[ "$(readlink .tools/runsc 2>/dev/null)" = "$runsc" ] || ln -sfn "$runsc" .tools/runsc

# --- What the race runs against ---

if [ "${1:-}" = bench ] && ! [ -x .tools/bin/gcsfuse ]; then
    { has_go && say "building gcsfuse (3 minutes, once)" && export GOTOOLCHAIN=auto && go_install $GCSFUSE_MODULE; } ||
        say "no gcsfuse (it takes Go 1.21 or newer): the race goes without it"
fi
