#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Layer 5: runs the test binaries that `make test-vm` has built on a kernel with IPVS,
# dummy links and SCTP, all in one boot of internal/tools/vm.sh.
#
#   internal/tools/test-vm.sh [all | short]
#
# VM_RESULTS names a file that gets the rows' results, for KPLAB_MODES_MERGE of
# `make test-modes`. Everything is some ten times slower there, and the start of a
# process seventy times.
set -euo pipefail
cd "$(dirname "$0")/../.."
top=$PWD

# Patterns of the mode's own tests, of the rows of the contract, and of the tests that
# are about ipvs alone, next to those.
case ${1:-all} in
all)
	mode='.'
	rows='.'
	more='^TestIPVS'
	;;
short)
	mode='^(TestApplyEqualsText|TestDevice)$'
	rows='^(C01|C07|C10|C23|D07|K12|O06)$'
	more='^TestIPVSLeaving$'
	;;
*)
	echo "test-vm: want all or short, not $1" >&2
	exit 2
	;;
esac

need=()
command -v ipvsadm >/dev/null || need+=(ipvsadm)
command -v ipset >/dev/null || need+=(ipset)
if [ "${#need[@]}" -gt 0 ]; then
	echo "test-vm: installing ${need[*]}" >&2
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${need[@]}" >/dev/null
fi

# A skip for the want of one of these would prove nothing.
export KPLAB_REQUIRE=root,iptables,nft,ipvs,dummy,sctp,bridge
export KPLAB_SLOW=1 KPLAB_MODES_JSON=/tmp/kplab-modes.json
export VM_ENV="KPLAB_REQUIRE KPLAB_SLOW KPLAB_MODES_JSON" VM_MODULES="ip_vs dummy sctp"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
# shellcheck disable=SC2016 # the guest's shell expands it
internal/tools/vm.sh bash -c '
	failed=0
	cd "$1/proxy/ipvs" && "$1/bin/ipvs.test" -test.v -test.timeout 20m -test.run "$2" || failed=1
	cd "$1/proxy/proxytest" && "$1/bin/proxytest.test" -test.v -test.timeout 20m -test.run "$4" || failed=1
	"$1/bin/proxytest.test" -test.v -test.timeout 20m -test.run "$3" || failed=1
	echo "--- results"
	cat "$KPLAB_MODES_JSON"
	exit $failed
' vm "$top" "$mode" "^TestModes\$/^ipvs\$/$rows" "$more" >"$log" || status=$?
# What was skipped or failed says why; of the rest the names are enough.
sed '/^--- results$/,$d; /^=== /d' "$log"
if [ -n "${VM_RESULTS:-}" ]; then
	sed '1,/^--- results$/d' "$log" >"$VM_RESULTS"
fi
exit "$status"
