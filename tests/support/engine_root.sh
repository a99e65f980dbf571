#!/usr/bin/env bash
# A throw-away system in namespaces of its own, for tests/support/engine_root.py, which starts it:
#
#   unshare --mount --propagation private engine_root.sh outer PLACE NAME ROOT [BIND...]
#
# PLACE is an empty directory, over which a tmpfs is mounted; NAME is that of the control groups; ROOT
# is the Debian root, which stays as it is: what is written goes to an overlay in the tmpfs. A BIND is
# a path that shows up in there, "ro:PATH" or "rw:PATH" at its own place, "rw:PATH:INSIDE" elsewhere.
#
# The outer half prints the pid of the system's init, then "ready", and keeps the system until its own
# stdin is closed, or until it is gone. Then it removes the control groups; all else goes with the
# namespaces. A line "reboot" on its stdin ends the system as the loss of power would: every process is
# killed at once, and its mounts, tmpfs and networks go with them. What lies on its disk, that is in
# PLACE, is there when it is started again; that start is told as the first one.
set -euo pipefail

controllers() { # the v1 hierarchies of this machine, one mount point a line
    awk '{ for (i = 7; $i != "-"; ++i); if ($(i + 1) == "cgroup") print $5 }' /proc/self/mountinfo
}

own_path() { # MOUNT-POINT: the directory there of the group that this process is in
    local options=",$(awk -v at="$1" '$5 == at { print $NF }' /proc/self/mountinfo),"
    awk -F : -v options="$options" '{ split($2, names, ",") }
        index(options, "," names[1] ",") { print $3; exit }' /proc/self/cgroup
}

remove_groups() { # [DEPTH]: the groups, or what is so deep below them and deeper
    local group last=$((SECONDS + 90))
    for group in "${groups[@]}"; do
        # The tasks are killed, but may take a while to be gone.
        while
            find "$group" -mindepth "${1:-0}" -depth -type d -exec rmdir {} + 2>/dev/null || true
            [ -n "$(find "$group" -mindepth "${1:-0}" -type d 2>/dev/null)" ] &&
                [ $SECONDS -lt $last ]
        do
            sleep 0.02
        done
        [ -z "$(find "$group" -mindepth "${1:-0}" -type d 2>/dev/null)" ] ||
            echo "engine_root: $group is still in use" >&2
    done
}

thaw_groups() { # a frozen task of a v1 hierarchy is not killed
    local state
    for state in $(find "${groups[@]}" -name freezer.state); do
        echo THAWED >"$state" || true
    done
}

outer() {
    local place=$1 name=$2 mounted group setting
    groups=()
    mount -t tmpfs -o mode=755 tmpfs "$place"
    mkdir "$place"/{root,upper,work,groups}
    # hugetlb in the unified hierarchy beside v1 ones: crun cannot restore there. It can be taken out
    # as long as nobody has made a group in the unified one.
    if [ -n "$(controllers)" ] && grep -q '^hugetlb' /proc/cgroups &&
        ! grep -q ' - cgroup [^ ]* .*\<hugetlb\>' /proc/self/mountinfo; then
        mkdir "$place/groups/hugetlb"
        mount -t cgroup -o hugetlb cgroup "$place/groups/hugetlb"
    fi
    for mounted in $(controllers); do
        group=$mounted$(own_path "$mounted")/$name
        mkdir "$group"
        groups+=("$group")
        for setting in cpuset.cpus cpuset.mems; do
            [ ! -e "$group/$setting" ] || cat "${group%/*}/$setting" >"$group/$setting"
        done
    done
    if [ ${#groups[@]} = 0 ]; then
        group=/sys/fs/cgroup$(cut -d : -f 3 /proc/self/cgroup)/$name
        mkdir "$group"
        groups=("$group")
    fi
    trap remove_groups EXIT
    # Beside v1 ones, a group of the unified hierarchy too: CRIU dumps all groups below a task's, and a
    # restore makes them again below the new one.
    if [ -n "$(controllers)" ] && grep -q '^0::' /proc/self/cgroup; then
        mkdir "$place/groups/unified"
        mount -t cgroup2 cgroup2 "$place/groups/unified"
        group=$place/groups/unified$(sed -n 's/^0:://p' /proc/self/cgroup)/$name
        mkdir "$group"
        groups+=("$group")
    fi
    exec 3<&0 # what runs in the background has another stdin
    while boot "$@" && [ -e "$place/reboot" ]; do
        rm "$place/reboot"
        remove_groups 1
    done
}

boot() { # the arguments of `outer`: run the system to its end
    local place=$1 word
    (
        exec 3<&-
        for group in "${groups[@]}"; do echo $BASHPID >"$group/cgroup.procs"; done
        exec unshare --mount --propagation private --pid --ipc --uts --net --cgroup --fork \
            --kill-child "$0" inner "$@" </dev/null
    ) &
    init=$!
    # The system's init first, so that unshare is there to see it end; it goes with unshare anyway.
    (
        read -r word <&3 && [ "$word" = reboot ] && : >"$place/reboot"
        kill -KILL $(cat /proc/$init/task/$init/children || echo $init)
        thaw_groups
    ) >/dev/null 2>&1 &
    wait $init 2>/dev/null || true
    kill $! 2>/dev/null || true
    wait $! 2>/dev/null || true
}

mount_system() { # ROOT: /proc, /sys, /dev, /run and /tmp
    local root=$1 name numbers
    mount -t sysfs sysfs "$root/sys"
    mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    for numbers in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0 fuse:10:229; do
        IFS=: read -r name major minor <<<"$numbers"
        mknod -m 666 "$root/dev/$name" c "$major" "$minor"
    done
    mkdir "$root"/dev/{pts,shm,mqueue}
    mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts "$root/dev/pts"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
    mount -t mqueue mqueue "$root/dev/mqueue"
    ln -s pts/ptmx "$root/dev/ptmx"
    ln -s /proc/self/fd "$root/dev/fd"
    for name in 0:stdin 1:stdout 2:stderr; do
        ln -s "/proc/self/fd/${name%:*}" "$root/dev/${name#*:}"
    done
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
    mount -t proc proc "$root/proc"
}

mount_groups() { # ROOT: v1 hierarchies from this system's own group on, or the unified one
    local at=$1/sys/fs/cgroup names number
    if [ -z "$(controllers)" ]; then
        mount -t cgroup2 cgroup2 "$at"
        mkdir "$at/init"
        echo 1 >"$at/init/cgroup.procs"
        return
    fi
    mount -t tmpfs -o mode=755 tmpfs "$at"
    if grep -q '^0::' /proc/self/cgroup; then
        mkdir "$1/run/unified" # for those who enter; the engines must not take it for theirs
        mount -t cgroup2 cgroup2 "$1/run/unified"
    fi
    while IFS=: read -r number names _; do
        [ "$number" != 0 ] || continue
        mkdir "$at/${names#name=}"
        case $names in
            name=*) mount -t cgroup -o "none,$names" cgroup "$at/${names#name=}" ;;
            *) mount -t cgroup -o "$names" cgroup "$at/$names" ;;
        esac
    done </proc/self/cgroup
}

bind() { # ROOT ro|rw PATH INSIDE
    local target=$1$4
    if [ -d "$3" ]; then
        mkdir -p "$target"
    else
        mkdir -p "${target%/*}"
        [ -e "$target" ] || : >"$target"
    fi
    mount --bind "$3" "$target"
    [ "$2" = rw ] || mount -o remount,bind,ro "$target"
}

inner() {
    local place=$1 lower=$3 root=$1/root mode path inside pid limit
    shift 3
    read -r pid _ </proc/self/stat # as the old /proc has it
    mount -t overlay -o "lowerdir=$lower,upperdir=$place/upper,workdir=$place/work" overlay "$root"
    mount_system "$root"
    mount_groups "$root"
    mkdir -p "$place/storage/containers" "$place/storage/containerd"
    # An overlay cannot lie on an overlay: the engines' storage is a tmpfs.
    bind "$root" rw "$place/storage/containers" /var/lib/containers
    bind "$root" rw "$place/storage/containerd" /var/lib/containerd
    for path in "$@"; do
        IFS=: read -r mode path inside <<<"$path"
        bind "$root" "$mode" "$path" "${inside:-$path}"
    done
    # Without CAP_SYS_RESOURCE nobody can have more files open than the hard limit, which CRIU asks
    # for and crun takes for the error that it reports.
    limit=$(ulimit -H -n)
    if [ "$limit" != unlimited ] && [ "$limit" -lt "$(cat /proc/sys/fs/nr_open)" ]; then
        echo "$limit" >"$place/nr_open"
        mount --bind "$place/nr_open" "$root/proc/sys/fs/nr_open"
    fi
    hostname engines
    ip link set lo up 2>/dev/null || chroot "$root" ip link set lo up
    cd "$root"
    pivot_root . .
    umount -l .
    cd /
    echo "$pid ready"
    exec catatonit -P >/dev/null 2>&1
}

half=$1
shift
"$half" "$@"
