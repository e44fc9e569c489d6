#!/bin/sh
# Signal that this application is ready to be saved, and tell the original from its copies.
# Needs a POSIX shell and its usual small programs.

token=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')

became=none
if [ -w /proc/gvisor/checkpoint ] && exec 3<>/proc/gvisor/checkpoint; then
    echo 1 >&3 # a second time in a pod's life it fails, and the read says "error"
    read -r became <&3
    exec 3>&-
fi

if [ "$became" = restore ]; then
    # A copy: re-make what belongs to one pod alone.
    POD_NAME=$(tr '\0' '\n' </proc/gvisor/spec_environ | sed -n 's/^POD_NAME=//p')
    token=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
fi

echo "$became $POD_NAME $(cat /proc/sys/kernel/hostname) $token"
while :; do sleep 1; done
