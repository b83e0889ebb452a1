// SPDX-License-Identifier: Apache-2.0

package registry

const (
	wideTemplate = "|web,log|nginx:1.25,busybox"
	negative     = "must be greater than or equal to 0"
	onePod       = `
  template:
    metadata: {labels: {app: nginx}}
    spec: {containers: [{name: web, image: "nginx:1.25"}, {name: log, image: busybox}]}
`
	oncePod = `
  template:
    metadata: {labels: {app: nginx}}
    spec: {restartPolicy: Never, containers: [{name: web, image: "nginx:1.25"}, {name: log, image: busybox}]}
`
	cronPod = `
  jobTemplate:
    spec:
      template:
        spec: {restartPolicy: OnFailure, containers: [{name: web, image: "nginx:1.25"}, {name: log, image: busybox}]}
`
)

func spec(text string) string { return "spec: " + text }

func workloadCases() []workloadCase {
	return append(appsCases(), append(batchCases(), append(policyCases(), coreCases()...)...)...)
}

func appsCases() []workloadCase {
	return []workloadCase{{
		kind:     statefulSetKind(),
		manifest: workloadManifest("\n  serviceName: web\n  volumeClaimTemplates: [{metadata: {name: data}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}]" + nginxPods),
		stored: []string{
			"podManagementPolicy: OrderedReady", "replicas: 1", "revisionHistoryLimit: 10", "  updateStrategy:\n    rollingUpdate:\n      maxUnavailable: 1\n      partition: 0\n    type: RollingUpdate",
			"whenDeleted: Retain", "whenScaled: Retain", "kind: PersistentVolumeClaim", "volumeMode: Filesystem", "phase: Pending", "restartPolicy: Always",
		},
		columns: "Name, Ready, Age",
		row:     "x|0/1|Age" + wideTemplate,
		refused: []rejection{
			{spec("{selector: {matchLabels: {app: other}}}"), "spec.template.metadata.labels: Invalid value: {\"app\":\"nginx\"}: `selector` does not match template `labels`"},
			{spec("{selector: null}"), "spec.selector: Required value"},
			{spec("{selector: {matchLabels: null}}"), "spec.selector: Invalid value: {}: empty selector is invalid for statefulset"},
			{spec("{podManagementPolicy: Random}"), `spec.podManagementPolicy: Invalid value: "Random": must be 'OrderedReady' or 'Parallel'`},
			{spec("{updateStrategy: {type: Recreate}}"), "must be 'RollingUpdate' or 'OnDelete'"},
			{spec("{updateStrategy: {type: OnDelete, rollingUpdate: {partition: 1}}}"), "spec.updateStrategy.rollingUpdate: Invalid value: {\"partition\":1}: only allowed for updateStrategy 'RollingUpdate'"},
			{spec("{updateStrategy: {rollingUpdate: {partition: -1}}}"), "spec.updateStrategy.rollingUpdate.partition: Invalid value: -1: " + negative},
			{spec("{updateStrategy: {rollingUpdate: {maxUnavailable: 0}}}"), "spec.updateStrategy.rollingUpdate.maxUnavailable: Invalid value: 0: cannot be 0"},
			{spec("{replicas: -1}"), "spec.replicas: Invalid value: -1: " + negative},
			{spec("{ordinals: {start: -1}}"), "spec.ordinals.start: Invalid value: -1: " + negative},
			{spec("{template: {spec: {restartPolicy: Never}}}"), `spec.template.spec.restartPolicy: Unsupported value: "Never": supported values: "Always"`},
			{spec("{template: {spec: {activeDeadlineSeconds: 5}}}"), "spec.template.spec.activeDeadlineSeconds: Forbidden: activeDeadlineSeconds in StatefulSet is not Supported"},
			{spec("{persistentVolumeClaimRetentionPolicy: {whenScaled: Maybe}}"), `spec.persistentVolumeClaimRetentionPolicy.whenScaled: Unsupported value: "Maybe": supported values: "Delete", "Retain"`},
			{"metadata: {name: a.b}", `metadata.name: Invalid value: "a.b": must not contain dots`},
		},
		changes: []rejection{
			{spec("{serviceName: other}"), `StatefulSet.apps "x" is invalid: spec: Forbidden: updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', 'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' are forbidden`},
			{spec("{podManagementPolicy: Parallel}"), "spec: Forbidden: updates to statefulset spec for fields other than"},
			{spec("{replicas: 3, minReadySeconds: 5, revisionHistoryLimit: 2, updateStrategy: {rollingUpdate: {partition: 2}}}"), ""},
		},
		status: "status: {observedGeneration: 2, replicas: 2, readyReplicas: 1, availableReplicas: 1, currentReplicas: 2, updatedReplicas: 2, currentRevision: x-1, updateRevision: x-1, collisionCount: 1}",
		rejected: []rejection{
			{"status: {replicas: 1, readyReplicas: 2}", "status.readyReplicas: Invalid value: 2: cannot be greater than status.replicas"},
			{"status: {replicas: 1, availableReplicas: 1}", "status.availableReplicas: Invalid value: 1: cannot be greater than status.readyReplicas"},
		},
	}, {
		kind:     daemonSetKind(),
		manifest: workloadManifest(nginxPods),
		stored:   []string{"revisionHistoryLimit: 10", "maxSurge: 0\n      maxUnavailable: 1\n    type: RollingUpdate", "restartPolicy: Always"},
		columns:  "Name, Desired, Current, Ready, Up-to-date, Available, Node Selector, Age",
		row:      "x|0|0|0|0|0|<none>|Age" + wideTemplate + "|app=nginx",
		refused: []rejection{
			{spec("{selector: {matchLabels: {app: other}}}"), "`selector` does not match template `labels`"},
			{spec("{selector: {matchLabels: null}}"), "spec.selector: Invalid value: {}: empty selector is invalid for daemonset"},
			{spec("{updateStrategy: {type: Recreate}}"), `spec.updateStrategy.type: Unsupported value: "Recreate": supported values: "OnDelete", "RollingUpdate"`},
			{spec("{updateStrategy: {rollingUpdate: {maxUnavailable: 0}}}"), "spec.updateStrategy.rollingUpdate.maxUnavailable: Required value: cannot be 0 when maxSurge is 0"},
			{spec("{updateStrategy: {rollingUpdate: {maxSurge: 1}}}"), "spec.updateStrategy.rollingUpdate.maxSurge: Invalid value: 1: may not be set when maxUnavailable is non-zero"},
			{spec("{template: {spec: {restartPolicy: OnFailure}}}"), `spec.template.spec.restartPolicy: Unsupported value: "OnFailure": supported values: "Always"`},
			{spec("{template: {spec: {activeDeadlineSeconds: 5}}}"), "activeDeadlineSeconds in DaemonSet is not Supported"},
			{spec("{minReadySeconds: -1}"), "spec.minReadySeconds: Invalid value: -1: " + negative},
		},
		changes: []rejection{
			{spec("{selector: {matchLabels: {app: b}}, template: {metadata: {labels: {app: b}}}}"), `DaemonSet.apps "x" is invalid: spec.selector: Invalid value: {"matchLabels":{"app":"b"}}: field is immutable`},
			{spec("{updateStrategy: {type: OnDelete, rollingUpdate: null}}"), ""},
		},
		status: "status: {observedGeneration: 2, desiredNumberScheduled: 2, currentNumberScheduled: 2, numberReady: 1, updatedNumberScheduled: 2, numberAvailable: 1, numberUnavailable: 1, numberMisscheduled: 1}",
		rejected: []rejection{
			{"status: {numberReady: -1}", "status.numberReady: Invalid value: -1: " + negative},
		},
	}, {
		kind:     controllerRevisionKind(),
		manifest: "{metadata: {name: x, namespace: default, ownerReferences: [{apiVersion: apps/v1, kind: StatefulSet, name: web, uid: u, controller: true}]}, revision: 3, data: {a: b}}",
		stored:   []string{"revision: 3", "data:\n  a: b"},
		columns:  "Name, Controller, Revision, Age",
		row:      "x|statefulset.apps/web|3|Age",
		refused: []rejection{
			{"revision: -1", "revision: Invalid value: -1: " + negative},
		},
		changes: []rejection{
			{"data: {a: c}", "data: Invalid value: {\"a\":\"c\"}: field is immutable"},
			{"revision: 4", ""},
		},
	}, {
		kind:     replicationControllerKind(),
		manifest: workloadManifest(onePod),
		stored:   []string{"labels:\n    app: nginx\n  name: x", "replicas: 1", "selector:\n    app: nginx"},
		columns:  "Name, Desired, Current, Ready, Age",
		row:      "x|1|0|0|Age" + wideTemplate + "|app=nginx",
		refused: []rejection{
			{spec("{template: null}"), "spec.template: Required value"},
			{spec("{template: {metadata: {labels: null}}}"), "spec.selector: Required value"},
			{spec("{selector: {app: other}}"), "spec.template.metadata.labels: Invalid value: {\"app\":\"nginx\"}: `selector` does not match template `labels`"},
			{spec("{replicas: -1}"), "spec.replicas: Invalid value: -1: " + negative},
			{spec("{template: {spec: {restartPolicy: Never}}}"), `spec.template.spec.restartPolicy: Unsupported value: "Never": supported values: "Always"`},
		},
		changes: []rejection{{spec("{replicas: 2}"), ""}},
		status:  "status: {replicas: 2, readyReplicas: 1, availableReplicas: 1, fullyLabeledReplicas: 2, observedGeneration: 1}",
		rejected: []rejection{
			{"status: {replicas: 1, readyReplicas: 2}", "status.readyReplicas: Invalid value: 2: cannot be greater than status.replicas"},
		},
	}, {
		kind:     podTemplateKind(),
		manifest: "metadata: {name: x, namespace: default}" + "\ntemplate: {metadata: {labels: {app: nginx}}, spec: {containers: [{name: web, image: nginx}]}}",
		stored:   []string{"generation: 1", "restartPolicy: Always"},
		columns:  "Name, Containers, Images, Pod Labels",
		row:      "x|web|nginx|app=nginx",
		refused:  []rejection{{"template: {spec: {containers: []}}", "template.spec.containers: Required value"}},
		changes:  []rejection{{"template: {metadata: {labels: {app: b}}}", ""}},
	}}
}

func batchCases() []workloadCase {
	return []workloadCase{{
		kind:     jobKind(),
		manifest: workloadManifest(oncePod),
		stored: []string{
			"backoffLimit: 6", "completionMode: NonIndexed", "completions: 1", "parallelism: 1", "suspend: false", "manualSelector: false", "podReplacementPolicy: TerminatingOrFailed",
			"batch.kubernetes.io/controller-uid: ", "batch.kubernetes.io/job-name: x", "job-name: x",
		},
		columns: "Name, Status, Completions, Duration, Age",
		row:     "x|Running|0/1||Age" + wideTemplate + "|batch.kubernetes.io/controller-uid=UID",
		refused: []rejection{
			{spec("{template: {spec: {restartPolicy: Always}}}"), `spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"`},
			{spec("{parallelism: -1}"), "spec.parallelism: Invalid value: -1: " + negative},
			{spec("{backoffLimit: -1}"), "spec.backoffLimit: Invalid value: -1: " + negative},
			{spec("{activeDeadlineSeconds: -1}"), "spec.activeDeadlineSeconds: Invalid value: -1: " + negative},
			{spec("{completionMode: Sideways}"), `spec.completionMode: Unsupported value: "Sideways": supported values: "Indexed", "NonIndexed"`},
			{spec("{completionMode: Indexed, parallelism: 2}"), "spec.completions: Required value: when completion mode is Indexed"},
			{spec("{backoffLimitPerIndex: 1}"), "spec.backoffLimitPerIndex: Invalid value: 1: requires indexed completion mode"},
			{spec("{selector: {matchLabels: {a: b}}}"), "`selector` not auto-generated"},
			{spec("{template: {metadata: {labels: {job-name: other}}}}"), "spec.template.metadata.labels[job-name]: Invalid value: "},
			{spec("{manualSelector: true}"), "spec.selector: Required value"},
			{spec("{podFailurePolicy: {rules: [{action: FailJob}]}}"), "specifying one of OnExitCodes and OnPodConditions is required"},
			{spec("{podFailurePolicy: {rules: [{action: FailJob, onExitCodes: {operator: In, values: [0]}}]}}"), "must not be 0 for the In operator"},
			{spec("{podFailurePolicy: {rules: []}, template: {spec: {restartPolicy: OnFailure}}}"), `only "Never" is supported when podFailurePolicy is specified`},
			{spec("{podFailurePolicy: {rules: [{onPodConditions: [{type: X}]}]}}"), `spec.podFailurePolicy.rules[0].action: Required value: valid values: ["Count" "FailIndex" "FailJob" "Ignore"]`},
			{spec("{podFailurePolicy: {rules: [{action: Count, onExitCodes: {operator: In, values: [3, 1, 3]}}]}}"), "spec.podFailurePolicy.rules[0].onExitCodes.values[2]: Duplicate value: 3, spec.podFailurePolicy.rules[0].onExitCodes.values: Invalid value: [3,1,3]: must be ordered"},
			{spec("{podFailurePolicy: {rules: [{action: FailIndex, onPodConditions: [{type: X}]}]}}"), "requires the backoffLimitPerIndex to be set"},
			{spec("{podFailurePolicy: {rules: []}, podReplacementPolicy: TerminatingOrFailed}"), `spec.podReplacementPolicy: Unsupported value: "TerminatingOrFailed": supported values: "Failed"`},
			{spec("{selector: {matchLabels: {batch.kubernetes.io/controller-uid: other}}}"), "`selector` not auto-generated"},
			{spec("{managedBy: me}"), `spec.managedBy: Invalid value: "me": must be a domain-prefixed path`},
			{spec("{maxFailedIndexes: 1}"), "[spec.maxFailedIndexes: Invalid value: 1: requires indexed completion mode, spec.backoffLimitPerIndex: Required value: when maxFailedIndexes is specified]"},
			{spec("{completionMode: Indexed, completions: 2, backoffLimitPerIndex: 1, maxFailedIndexes: 3}"), "spec.maxFailedIndexes: Invalid value: 3: must be less than or equal to completions"},
			{spec("{completionMode: Indexed, completions: 200000, parallelism: 20000, backoffLimitPerIndex: 1, maxFailedIndexes: 5}"), "spec.parallelism: Invalid value: 20000: must be less than or equal to 10000 when completions are above 100000 and used with backoff limit per index"},
			{spec("{successPolicy: {rules: [{succeededCount: 1}]}}"), "requires indexed completion mode"},
			{spec("{completionMode: Indexed, completions: 3, successPolicy: {rules: []}}"), "spec.successPolicy.rules: Required value: at least one rules must be specified when the successPolicy is specified"},
			{spec("{completionMode: Indexed, completions: 3, successPolicy: {rules: [{}]}}"), "spec.successPolicy.rules[0]: Required value: at least one of succeededCount or succeededIndexes must be specified"},
			{spec(`{completionMode: Indexed, completions: 3, successPolicy: {rules: [{succeededIndexes: "0-3"}]}}`), `spec.successPolicy.rules[0].succeededIndexes: Invalid value: "0-3": error parsing succeededIndexes: too large index: "3"`},
			{spec(`{completionMode: Indexed, completions: 9, successPolicy: {rules: [{succeededIndexes: "2,0-1"}]}}`), "error parsing succeededIndexes: non-increasing order, previous: 2, current: 0"},
			{spec(`{completionMode: Indexed, completions: 9, successPolicy: {rules: [{succeededIndexes: "0-1", succeededCount: 3}]}}`), "must be less than or equal to 2 (the number of indexes in the specified succeededIndexes field)"},
		},
		changes: []rejection{
			{spec("{completions: 2}"), `Job.batch "x" is invalid: spec.completions: Invalid value: 2: field is immutable`},
			{spec("{template: {spec: {hostNetwork: true}}}"), "spec.template: Invalid value: "},
			{spec("{completionMode: Indexed}"), `spec.completionMode: Invalid value: "Indexed": field is immutable`},
			{spec("{podFailurePolicy: {rules: []}, podReplacementPolicy: Failed}"), "spec.podFailurePolicy: Invalid value: "},
			{spec("{managedBy: example.com/me}"), `spec.managedBy: Invalid value: "example.com/me": field is immutable`},
			{spec("{template: {spec: {nodeSelector: {a: b}}}}"), "spec.template: Invalid value: "},
			{spec("{parallelism: 3, backoffLimit: 1, suspend: true, ttlSecondsAfterFinished: 5}"), ""},
			// Suspended and without pods: where they go and what they ask for may change.
			{spec("{template: {metadata: {annotations: {a: b}}, spec: {nodeSelector: {a: b}, schedulingGates: [{name: example.com/g}], affinity: {nodeAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 1, preference: {matchExpressions: [{key: a, operator: Exists}]}}]}}}}}"), ""},
			{spec(`{template: {spec: {containers: [{name: web, image: "nginx:1.25", resources: {requests: {cpu: 1}}}, {name: log, image: busybox}]}}}`), ""},
			{spec("{template: {spec: {hostNetwork: true}}}"), "spec.template: Invalid value: "},
		},
		status: `status: {succeeded: 1, failed: 2, ready: 0, startTime: "2026-01-01T00:00:00Z", completionTime: "2026-01-01T00:00:05Z", conditions: [{type: SuccessCriteriaMet, status: "True", lastProbeTime: null, lastTransitionTime: null}, {type: Complete, status: "True", lastProbeTime: null, lastTransitionTime: null}]}`,
		rejected: []rejection{
			{"status: {active: -1}", "status.active: Invalid value: -1: " + negative},
			{`status: {completionTime: "2026-01-01T00:00:05Z"}`, "cannot set completionTime when there is no Complete=True condition"},
			{`status: {conditions: [{type: Complete, status: "True"}]}`, "cannot set Complete=True condition without the SuccessCriteriaMet=true condition"},
			{`status: {conditions: [{type: Failed, status: "True"}]}`, "cannot set Failed=True condition without the FailureTarget=true condition"},
			{`status: {startTime: "2026-01-01T00:00:00Z", active: 1, conditions: [{type: FailureTarget, status: "True"}, {type: Failed, status: "True"}]}`, "status.active: Invalid value: 1: active>0 is invalid for finished job"},
			{`status: {conditions: [{type: FailureTarget, status: "True"}, {type: Failed, status: "True"}]}`, "status.startTime: Required value: startTime is required for finished job"},
			{`status: {conditions: [{type: SuccessCriteriaMet, status: "True"}, {type: FailureTarget, status: "True"}]}`, "cannot set SuccessCriteriaMet=True and FailureTarget=true conditions"},
			{`status: {startTime: "2026-01-01T00:00:09Z", completionTime: "2026-01-01T00:00:05Z", conditions: [{type: SuccessCriteriaMet, status: "True"}, {type: Complete, status: "True"}]}`, "completionTime cannot be set before startTime"},
			{"status: {active: 1, ready: 2}", "status.ready: Invalid value: 2: cannot set more ready pods than active"},
			{"status: {uncountedTerminatedPods: {succeeded: [a], failed: [a]}}", `status.uncountedTerminatedPods.failed[0]: Duplicate value: "a"`},
			{`status: {completedIndexes: "0"}`, "cannot set non-empty completedIndexes when non-indexed completion mode"},
			{`status: {failedIndexes: "0"}`, "cannot set non-null failedIndexes when backoffLimitPerIndex is null"},
		},
	}, {
		kind:     cronJobKind(),
		manifest: workloadManifest("\n  schedule: \"*/5 * * * *\"" + cronPod),
		stored:   []string{"concurrencyPolicy: Allow", "suspend: false", "successfulJobsHistoryLimit: 3", "failedJobsHistoryLimit: 1", "dnsPolicy: ClusterFirst"},
		columns:  "Name, Schedule, Timezone, Suspend, Active, Last Schedule, Age",
		row:      "x|*/5 * * * *|<none>|False|0|<none>|Age" + wideTemplate + "|<none>",
		refused: []rejection{
			{spec(`{schedule: "* * * * * *"}`), `CronJob.batch "x" is invalid: spec.schedule: Invalid value: "* * * * * *": expected exactly 5 fields, found 6: [* * * * * *]`},
			{spec(`{schedule: "61 * * * *"}`), `spec.schedule: Invalid value: "61 * * * *": end of range (61) above maximum (59): 61`},
			{spec(`{schedule: ""}`), "spec.schedule: Required value"},
			{spec(`{schedule: "TZ=UTC 0 * * * *"}`), "cannot use TZ or CRON_TZ in schedule, use timeZone field instead"},
			{spec(`{schedule: "TZ=0"}`), "spec.schedule: Invalid value: \"TZ=0\""},
			{spec("{timeZone: Mars/Olympus}"), `spec.timeZone: Invalid value: "Mars/Olympus": unknown time zone Mars/Olympus`},
			{spec("{timeZone: Europe/../Berlin}"), `spec.timeZone: Invalid value: "Europe/../Berlin": unknown time zone Europe/../Berlin`},
			{spec("{timeZone: Local}"), "timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones"},
			{spec(`{timeZone: ""}`), "timeZone must be nil or non-empty string"},
			{spec("{concurrencyPolicy: Maybe}"), `spec.concurrencyPolicy: Unsupported value: "Maybe": supported values: "Allow", "Forbid", "Replace"`},
			{spec("{startingDeadlineSeconds: -1}"), "spec.startingDeadlineSeconds: Invalid value: -1: " + negative},
			{spec("{jobTemplate: {spec: {template: {spec: {restartPolicy: Always}}}}}"), `spec.jobTemplate.spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"`},
			{spec("{jobTemplate: {spec: {selector: {matchLabels: {a: b}}}}}"), "spec.jobTemplate.spec.selector: Invalid value: {\"matchLabels\":{\"a\":\"b\"}}: `selector` will be auto-generated"},
			{"metadata: {name: " + "a123456789b123456789c123456789d123456789e123456789xyz" + "}", "metadata.name: Invalid value: \"a123456789b123456789c123456789d123456789e123456789xyz\": must be no more than 52 characters"},
		},
		changes: []rejection{
			{spec(`{schedule: "TZ=UTC 0 * * * *"}`), "cannot use TZ or CRON_TZ in schedule, use timeZone field instead"},
			{spec(`{schedule: "@hourly", timeZone: Europe/Berlin, suspend: true}`), ""},
		},
		status: `status: {lastScheduleTime: "2026-01-01T00:00:00Z", active: [{kind: Job, name: y}]}`,
	}}
}
