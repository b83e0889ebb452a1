// SPDX-License-Identifier: Apache-2.0

package registry

func policyCases() []workloadCase {
	return []workloadCase{{
		kind:     podDisruptionBudgetKind(),
		manifest: "{metadata: {name: x, namespace: default}, spec: {minAvailable: 50%, selector: {matchLabels: {app: a}}}}",
		stored:   []string{"minAvailable: 50%", "generation: 1"},
		columns:  "Name, Min Available, Max Unavailable, Allowed Disruptions, Age",
		row:      "x|50%|N/A|0|Age",
		refused: []rejection{
			{spec("{maxUnavailable: 1}"), "minAvailable and maxUnavailable cannot be both set"},
			{spec("{minAvailable: -1}"), "spec.minAvailable: Invalid value: -1: " + negative},
			{spec("{minAvailable: 101%}"), `spec.minAvailable: Invalid value: "101%": must not be greater than 100%`},
			{spec("{unhealthyPodEvictionPolicy: Never}"), `spec.unhealthyPodEvictionPolicy: Unsupported value: "Never": supported values: "AlwaysAllow", "IfHealthyBudget"`},
		},
		changes:  []rejection{{spec("{minAvailable: 2}"), "metadata.resourceVersion: Invalid value: 0: must be specified for an update"}},
		status:   "status: {disruptionsAllowed: 1, currentHealthy: 2, desiredHealthy: 1, expectedPods: 2, observedGeneration: 1}",
		rejected: []rejection{{"status: {expectedPods: -1}", "status.expectedPods: Invalid value: -1: " + negative}},
	}, {
		kind:     priorityClassKind(),
		manifest: "{metadata: {name: x}, value: 1000}",
		stored:   []string{"preemptionPolicy: PreemptLowerPriority"},
		columns:  "Name, Value, Global-Default, Age, PreemptionPolicy",
		row:      "x|1000|false|Age|PreemptLowerPriority",
		refused: []rejection{
			{"value: 1000000001", "value: Forbidden: maximum allowed value of a user defined priority is 1000000000"},
			{"metadata: {name: system-mine}", "priority class names with 'system-' prefix are reserved for system use only. error: system-mine is not a known system priority class"},
			{"preemptionPolicy: Sometimes", `preemptionPolicy: Unsupported value: "Sometimes": supported values: "Never", "PreemptLowerPriority"`},
		},
		changes: []rejection{
			{"value: 5", "value: Forbidden: may not be changed in an update."},
			{"preemptionPolicy: Never", "field is immutable"},
			{"description: text", ""},
		},
	}, {
		kind:     horizontalPodAutoscalerKind(),
		manifest: "{metadata: {name: x, namespace: default}, spec: {maxReplicas: 5, scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: web}}}",
		stored:   []string{"minReplicas: 1", "averageUtilization: 80", "name: cpu"},
		columns:  "Name, Reference, Targets, MinPods, MaxPods, Replicas, Age",
		row:      "x|Deployment/web|cpu: <unknown>/80%|1|5|0|Age",
		refused: []rejection{
			{spec("{maxReplicas: 0}"), "spec.maxReplicas: Invalid value: 0: must be greater than 0"},
			{spec("{minReplicas: 6}"), "spec.maxReplicas: Invalid value: 5: must be greater than or equal to `minReplicas`"},
			{spec("{minReplicas: 0}"), "spec.minReplicas: Invalid value: 0: must be greater than or equal to 1"},
			{spec("{scaleTargetRef: {name: \"\"}}"), "spec.scaleTargetRef.name: Required value"},
			{spec("{metrics: [{type: Resource}]}"), "spec.metrics[0].resource: Required value: must populate information for the given metric source"},
			{spec("{behavior: {scaleDown: {stabilizationWindowSeconds: 3601}}}"), "must be less than or equal to 3600"},
		},
		changes: []rejection{{spec("{maxReplicas: 7}"), ""}},
		status:  "status: {currentReplicas: 2, desiredReplicas: 3, conditions: [], currentMetrics: null}",
		rejected: []rejection{
			{"status: {currentReplicas: -1}", "status.currentReplicas: Invalid value: -1: " + negative},
		},
	}}
}

func coreCases() []workloadCase {
	return []workloadCase{{
		kind:     persistentVolumeKind(),
		manifest: "{metadata: {name: x}, spec: {capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce, ReadOnlyMany], hostPath: {path: /data}, storageClassName: slow}}",
		stored:   []string{"persistentVolumeReclaimPolicy: Retain", "volumeMode: Filesystem", "phase: Pending", "type: \"\""},
		columns:  "Name, Capacity, Access Modes, Reclaim Policy, Status, Claim, StorageClass, VolumeAttributesClass, Reason, Age",
		row:      "x|1Gi|RWO,ROX|Retain|Pending||slow|<unset>||Age|Filesystem",
		refused: []rejection{
			{spec("{capacity: null}"), "spec.capacity: Required value"},
			{spec("{accessModes: []}"), "spec.accessModes: Required value: at least 1 access mode is required"},
			{spec("{accessModes: [Sometimes]}"), `spec.accessModes: Unsupported value: "Sometimes"`},
			{spec("{hostPath: null}"), "spec: Required value: must specify a volume type"},
			{spec("{hostPath: {path: /a/../b}}"), "spec.hostPath.path: Invalid value: \"/a/../b\": must not contain '..'"},
			{spec("{nfs: {server: s, path: /}}"), "spec: Forbidden: may not specify more than 1 volume type"},
			{spec("{persistentVolumeReclaimPolicy: Burn}"), `spec.persistentVolumeReclaimPolicy: Unsupported value: "Burn": supported values: "Delete", "Recycle", "Retain"`},
		},
		changes: []rejection{
			{spec("{hostPath: {path: /other}}"), "spec.persistentvolumesource: Forbidden: spec.persistentvolumesource is immutable after creation"},
			{spec("{persistentVolumeReclaimPolicy: Delete}"), ""},
		},
		status: "status: {phase: Bound}",
	}, {
		kind:     persistentVolumeClaimKind(),
		manifest: "{metadata: {name: x, namespace: default}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}, storageClassName: slow}}",
		stored:   []string{"volumeMode: Filesystem", "phase: Pending"},
		columns:  "Name, Status, Volume, Capacity, Access Modes, StorageClass, VolumeAttributesClass, Age",
		row:      "x|Pending||||slow|<unset>|Age|Filesystem",
		refused: []rejection{
			{spec("{accessModes: []}"), "spec.accessModes: Required value: at least 1 access mode is required"},
			{spec("{resources: {requests: null}}"), "spec.resources.requests[storage]: Required value"},
			{spec("{accessModes: [ReadWriteOncePod, ReadWriteOnce]}"), "spec.accessModes: Forbidden: may not use ReadWriteOncePod with other access modes"},
			{spec("{volumeMode: Tape}"), `spec.volumeMode: Unsupported value: "Tape": supported values: "Block", "Filesystem"`},
		},
		changes: []rejection{
			{spec("{accessModes: [ReadWriteMany]}"), "spec: Forbidden: spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims"},
			{spec("{volumeName: v}"), ""},
		},
		status: "status: {phase: Bound, capacity: {storage: 2Gi}, accessModes: [ReadWriteOnce]}",
	}, {
		kind:     resourceQuotaKind(),
		manifest: "{metadata: {name: x, namespace: default}, spec: {hard: {pods: 4, limits.cpu: 2}}}",
		stored:   []string{"pods: \"4\""},
		columns:  "Name, Request, Limit, Age",
		row:      "x|||Age",
		refused: []rejection{
			{spec("{hard: {pods: -1}}"), `spec.hard[pods]: Invalid value: "-1": ` + negative},
			{spec("{scopes: [Sunny]}"), "unsupported scope"},
		},
		changes: []rejection{
			{spec("{hard: {pods: 5}}"), ""},
			{spec("{scopes: [BestEffort]}"), "spec.scopes: Invalid value: [\"BestEffort\"]: field is immutable"},
		},
		status: "status: {hard: {pods: \"4\", limits.cpu: \"2\"}, used: {pods: \"1\", limits.cpu: 500m}}",
	}, {
		kind:     limitRangeKind(),
		manifest: "{metadata: {name: x, namespace: default}, spec: {limits: [{type: Container, max: {cpu: 1}, min: {cpu: 100m, memory: 10Mi}}]}}",
		stored:   []string{"default:\n      cpu: \"1\"\n    defaultRequest:\n      cpu: \"1\"\n      memory: 10Mi"},
		columns:  "Name, Created At",
		row:      "x|Created At",
		refused: []rejection{
			{spec("{limits: [{type: Container, max: {cpu: 1}, min: {cpu: 2}}]}"), "spec.limits[0].min[cpu]: Invalid value: \"2\": min value 2 is greater than max value 1"},
			{spec("{limits: [{type: Pod, default: {cpu: 1}}]}"), "spec.limits[0].default: Forbidden: may not be specified when `type` is 'Pod'"},
			{spec("{limits: [{type: Container}, {type: Container}]}"), `spec.limits[1].type: Duplicate value: "Container"`},
			{spec("{limits: [{type: Container, maxLimitRequestRatio: {cpu: 500m}}]}"), "ratio 500m is less than 1"},
		},
		changes: []rejection{{spec("{limits: [{type: Pod, max: {cpu: 2}, default: null, defaultRequest: null}]}"), ""}},
	}}
}
