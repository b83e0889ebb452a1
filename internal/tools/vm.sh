#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command as root on a stock Debian kernel, in a virtual machine that lives as
# long as the command: for tests of what this machine's kernel may lack (ip_vs, dummy,
# sctp, netem).
#
#   internal/tools/vm.sh COMMAND [ARGUMENT…]
#
# The guest sees this machine's files at the same paths. It cannot change them: they
# are mounted read-only below a layer in memory, which ends with the guest. What comes
# out is the command's output and its exit status; 125 when the guest gave none.
#
# Settings, from the environment:
#   VM_DIR       where the kernel is kept (default /var/tmp/kplab-vm), an absolute path
#   VM_KERNEL    the Debian package that names the kernel
#   VM_SMP       processors (1)        VM_MEM      memory (2G)
#   VM_TIMEOUT   seconds (900)         VM_MODULES  modules to load first
#   VM_ENV       names of variables that the command sees
set -euo pipefail

dir=${VM_DIR:-/var/tmp/kplab-vm}
package=${VM_KERNEL:-linux-image-6.12-cloud-amd64}
smp=${VM_SMP:-1} memory=${VM_MEM:-2G} timeout=${VM_TIMEOUT:-900}

say() { echo "vm: $*" >&2; }
if [ "$#" -eq 0 ]; then
	say "want a command to run in the machine"
	exit 2
fi
if [ "$(uname -m)" != x86_64 ]; then
	say "only x86_64 so far, this is $(uname -m)"
	exit 1
fi

# apt installs with fresh lists: those of an old image name files that are gone.
updated=
update() { [ -n "$updated" ] || apt-get update -qq; updated=yes; }

install_tools() {
	local lacks=()
	command -v qemu-system-x86_64 >/dev/null || lacks+=(qemu-system-x86)
	command -v zstd >/dev/null || lacks+=(zstd)
	command -v depmod >/dev/null || lacks+=(kmod)
	[ "${#lacks[@]}" -gt 0 ] || return 0
	say "installing ${lacks[*]}"
	update
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${lacks[@]}" >/dev/null
}

# number FILE OFFSET BYTES prints a little-endian number.
number() { od -An -v -tu"$3" -j"$2" -N"$3" "$1" | tr -d ' '; }

# fetch_kernel unpacks the kernel's package: nothing of it is installed. The machine
# boots the bare kernel out of the compressed image, which spares it the unpacking.
fetch_kernel() {
	[ ! -s "$dir/release" ] || return 0
	update
	local image work
	image=$(apt-cache depends "$package" | sed -n 's/^ *Depends: \(linux-image-[0-9][^ ]*\)$/\1/p' | head -n 1)
	if [ -z "$image" ]; then
		say "package $package names no kernel: set VM_KERNEL to one that apt-cache knows"
		exit 1
	fi
	say "fetching $image"
	mkdir -p "$dir"
	work=$(mktemp -d "$dir/fetch.XXXXXX")
	(cd "$work" && apt-get -o APT::Sandbox::User=root download -qq "$image")
	dpkg-deb --extract "$work"/*.deb "$work/root"
	local release=${image#linux-image-} boot="$work/root/boot/vmlinuz-${image#linux-image-}"
	depmod --basedir "$work/root" "$release"
	# The boot protocol's header: how many sectors of set-up code, where the payload
	# begins after them, and how long it is; its last four bytes are its size unpacked.
	local skip length
	skip=$((($(number "$boot" 497 1) + 1) * 512 + $(number "$boot" 584 4)))
	length=$(($(number "$boot" 588 4) - 4))
	dd if="$boot" bs=1M iflag=skip_bytes,count_bytes skip="$skip" count="$length" status=none | zstd -dcq >"$work/vmlinux"
	rm -rf "$dir/modules" "$dir/vmlinux"
	mv "$work/root" "$dir/modules"
	mv "$work/vmlinux" "$dir/vmlinux"
	rm -rf "$work"
	echo "$release" >"$dir/release"
}

install_tools
fetch_kernel
release=$(cat "$dir/release")
run=$(mktemp -d "$dir/run.XXXXXX")
share=
finish() {
	[ -z "$share" ] || kill "$share" 2>/dev/null || true
	rm -rf "$run"
}
trap finish EXIT

# What runs in the machine: the command, with the variables that are asked for.
{
	echo '#!/bin/bash'
	for name in ${VM_ENV:-}; do
		[ -z "${!name+set}" ] || printf 'export %s=%q\n' "$name" "${!name}"
	done
	printf 'cd %q || exit 125\n' "$PWD"
	for module in ${VM_MODULES:-}; do
		printf 'modprobe %q || exit 125\n' "$module"
	done
	printf 'exec'
	printf ' %q' "$@"
	echo
} >"$run/command"

# The kernel loads modules by a program that it starts outside of the changed root.
printf '#!/bin/sh\nexec /sbin/modprobe -d %q "$@"\n' "$dir/modules" >"$run/modprobe"

cat >"$run/init" <<END
#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc
mount -t devtmpfs dev /dev 2>/dev/null
echo $run/modprobe >/proc/sys/kernel/modprobe
modprobe -d $dir/modules overlay
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
root=/mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay \$root
mkdir -p \$root/lib/modules/$release
mount --bind $dir/modules/lib/modules/$release \$root/lib/modules/$release
mount -t proc proc \$root/proc
mount -t sysfs sys \$root/sys
mount -t devtmpfs dev \$root/dev
ln -sfn /proc/self/fd \$root/dev/fd
mkdir -p \$root/dev/pts \$root/dev/shm
mount -t devpts devpts \$root/dev/pts
mount -t tmpfs tmpfs \$root/dev/shm
mount -t tmpfs tmpfs \$root/run
mount -t cgroup2 cgroup \$root/sys/fs/cgroup
ip link set lo up
out=\$(echo /dev/vport*p1) status=\$(echo /dev/vport*p2)
chroot \$root bash $run/command </dev/null >\$out 2>&1
echo \$? >\$status
echo o >/proc/sysrq-trigger
sleep 60
END
chmod +x "$run/init" "$run/modprobe"

virtiofsd=/usr/lib/qemu/virtiofsd
[ -x "$virtiofsd" ] || virtiofsd=/usr/libexec/virtiofsd
"$virtiofsd" --socket-path="$run/files" -o source=/,cache=always,sandbox=chroot >"$run/virtiofsd.log" 2>&1 &
share=$!
for ((i = 0; i < 200; i++)); do
	[ ! -S "$run/files" ] || break
	sleep 0.05
done

# Always emulated: a /dev/kvm that opens need not be one that runs this kernel. The
# output goes to a pipe, because a port at the end of its input blocks who writes to it.
machine=(
	-accel tcg,thread=multi -cpu Nehalem -M q35 -smp "$smp" -m "$memory"
	-object "memory-backend-memfd,id=ram,size=$memory,share=on" -numa node,memdev=ram
	-nodefaults -no-user-config -display none -no-reboot
	-serial "file:$run/console"
	-chardev "socket,id=files,path=$run/files" -device vhost-user-fs-pci,chardev=files,tag=root
	-device virtio-rng-pci -device virtio-serial-pci
	-chardev file,id=out,path=/dev/stdout,append=on -device virtserialport,chardev=out,nr=1
	-chardev "file,id=status,path=$run/status" -device virtserialport,chardev=status,nr=2
	-kernel "$dir/vmlinux"
	-append "console=ttyS0 quiet panic=-1 mitigations=off root=root rootfstype=virtiofs ro init=$run/init"
)
say "booting Linux $release ($smp CPU, $memory)"
timeout -k 5 "$timeout" qemu-system-x86_64 "${machine[@]}" </dev/null | cat || true
if [ -s "$run/status" ]; then
	exit "$(cat "$run/status")"
fi
say "the machine gave no exit status (limit ${timeout}s); its console ends with:"
tail -n 30 "$run/console" >&2 || true
exit 125
