#!/bin/busybox sh
# The guest's first process. There is no udev, no modprobe and no libc here; see initramfs.rs for what the image holds.
# What it says on the console (ttyS0) the lab reads: READY, LAB-FAILED, AGENT-EXIT.

/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /bin
export PATH=/bin HOME=/
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
exec </dev/console >/dev/console 2>&1
. /etc/lab.conf

fail() {
    echo "LAB-FAILED $*"
    poweroff -f
}

while read -r module; do
    case $module in
    *.xz) xzcat "/modules/$module" >/tmp/module.ko && insmod /tmp/module.ko ;;
    *) insmod "/modules/$module" ;;
    esac || fail "insmod $module"
done </modules/order

mount -t tracefs tracefs /sys/kernel/tracing || fail "mount tracefs"

# Ports are announced over the control queue after the device is probed, so they trickle in. Only what uses them by
# a fixed name has to wait; the agent watches for ports itself.
name_ports() {
    mkdir -p /dev/virtio-ports
    for port in /sys/class/virtio-ports/*; do
        [ -s "$port/name" ] && ln -sf "../${port##*/}" "/dev/virtio-ports/$(cat "$port/name")"
    done
}
wait_for_port() {
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        name_ports
        [ -e "/dev/virtio-ports/$1" ] && return 0
        usleep 100000
    done
    return 1
}
name_ports

INSTANCE=/sys/kernel/tracing/instances/vmtrail
# What the agent would do, for guests that have none.
make_instance() {
    mkdir "$INSTANCE" || fail "mkdir $INSTANCE"
    echo mono >"$INSTANCE/trace_clock"
    echo "$RING_KIB" >"$INSTANCE/buffer_size_kb"
    for event in $EVENTS; do
        echo 1 >"$INSTANCE/events/$(echo "$event" | tr : /)/enable" || fail "enable $event"
    done
}

case $EXPORTER in
agent)
    # shellcheck disable=SC2086  # the arguments are words
    (
        vmtrail-agent $AGENT_ARGUMENTS
        echo "AGENT-EXIT $?"
    ) &
    ;;
copy)
    make_instance
    for cpu in "$INSTANCE"/per_cpu/cpu*; do
        number=${cpu##*/cpu}
        wait_for_port "trace-path-cpu$number" || fail "no port trace-path-cpu$number"
        guest-workload copy "$cpu/trace_pipe_raw" "/dev/virtio-ports/trace-path-cpu$number" &
    done
    ;;
nobody)
    make_instance
    ;;
esac

# The second serial line takes the lab's commands, byte by byte as they are.
stty -F /dev/ttyS1 raw -echo
if [ "$SHELL_WANTED" = yes ]; then
    guest-workload serve --rate "$MARKS_PER_SECOND" --load "$LOAD" </dev/ttyS1 >/dev/ttyS1 &
    echo
    echo "This is the lab's guest. The trace instance is $INSTANCE. 'poweroff -f' or Ctrl-A X ends it."
    while true; do setsid cttyhack sh; done
fi
guest-workload serve --rate "$MARKS_PER_SECOND" --load "$LOAD" </dev/ttyS1 >/dev/ttyS1
fail "the workload ended: $?"
