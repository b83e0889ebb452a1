// SPDX-License-Identifier: Apache-2.0

package labs

import "fmt"

// phrase is something that the engine says, in both languages.
type phrase struct{ en, zh string }

func (p phrase) in(l Lang, args ...any) string {
	if l == ZH {
		return fmt.Sprintf(p.zh, args...)
	}
	return fmt.Sprintf(p.en, args...)
}

var (
	msgNotSo    = phrase{"not yet so: %s", "尚未满足：%s"}
	msgFinished = phrase{"lab %s is done", "实验 %s 已全部完成"}
	msgNoHints  = phrase{"this step has no hints; `kplab lab solve` shows how it is done", "这一步没有提示；`kplab lab solve` 会演示做法"}
	msgDoing    = phrase{"+ %s", "+ %s"}
	msgStep     = phrase{"Step %d of %d: %s", "第 %d 步（共 %d 步）：%s"}
	msgSkipped  = phrase{"(step %s needs a node and is skipped on this cluster)", "（步骤 %s 需要进入节点，在此集群上跳过）"}
	msgNext     = phrase{
		"namespace %[3]s; %[1]s lab check | hint | solve | reset | stop",
		"命名空间 %[3]s；%[1]s lab check（检查）| hint（提示）| solve（演示做法）| reset（重来）| stop（收起）",
	}
	msgNextForeign = phrase{
		"export KUBECONFIG=%[3]s   # its namespace is %[4]s\n%[1]s lab check%[2]s | hint | solve | reset | stop",
		"export KUBECONFIG=%[3]s   # 命名空间为 %[4]s\n%[1]s lab check%[2]s（检查）| hint（提示）| solve（演示做法）| reset（重来）| stop（收起）",
	}
	msgLeft    = phrase{"lab %s is put away; its progress is kept", "已收起实验 %s，进度已保留"}
	msgNotLeft = phrase{"lab %s could not be put away: %v", "无法收起实验 %s：%v"}
)
