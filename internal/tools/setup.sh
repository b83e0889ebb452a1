#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the packages of Debian that a lab or its tests use and that this
# machine lacks. Asks for nothing when all are there.
set -eu
lacks=
need() { command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || lacks="$lacks $2"; }
need iptables iptables
need nft nftables
need conntrack conntrack
need ip iproute2
need busybox busybox-static
need curl curl
need dig bind9-dnsutils
need tcpdump tcpdump
need jq jq
need netstat net-tools
need gcc gcc
[ -e /usr/include/stdlib.h ] || lacks="$lacks libc6-dev"
[ -n "$lacks" ] || exit 0
command -v apt-get >/dev/null 2>&1 || { echo "please install:$lacks (this is no Debian: there is no apt-get)" >&2; exit 1; }
sudo=
[ "$(id -u)" = 0 ] || sudo=sudo
echo "installing:$lacks" >&2
$sudo apt-get update -q >&2
# shellcheck disable=SC2086 # a list of words
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -q --no-install-recommends $lacks >&2
