#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes Deployment and Service my-nginx again, as the tutorial has done between two of
# its sections: all pods on k8s-node1, and with the addresses that the names of the
# chains there follow from. A node hands its addresses out in their order.
set -euo pipefail
before=103 # my-nginx gets the two behind it
kubectl cordon k8s-node2 >/dev/null
kubectl run spare --image=pause >/dev/null
kubectl wait --for=condition=Ready pod/spare >/dev/null
last=$(kubectl get pod spare -o jsonpath='{.status.podIP}')
more=$((before - ${last##*.}))
[ "$more" -ge 0 ] || { echo "the last address is $last, and is to be below 10.244.36.$((before + 1))" >&2; exit 1; }
kubectl create deployment spares --image=pause --replicas="$more" >/dev/null
kubectl rollout status deployment spares >/dev/null
kubectl delete pod/spare deployment/spares >/dev/null
while [ -n "$(kubectl get pods -l app=spares -o name)" ]; do kubectl wait --for=delete pod -l app=spares --timeout=60s >/dev/null; done
kubectl apply -f deploy-demo.yaml -f service-demo.yaml >/dev/null
kubectl rollout status deployment my-nginx >/dev/null
