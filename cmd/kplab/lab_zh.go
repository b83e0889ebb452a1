// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// chineseHelp is the help of the lab commands in Chinese: a short and a long text.
func chineseHelp() map[string][2]string {
	return map[string][2]string{
		"lab": {"会自己检查的练习", `会自己检查的练习：看网络实际做了什么，而不是你输入了什么。

  kplab lab list             有哪些实验，以及你的进度
  kplab lab start 01         开始一个实验；没有集群在运行时会先启动一个
  kplab lab check            这一步完成了吗？还缺什么？
  kplab lab hint             给一点提示，每次多一点

不写实验名时，指最近开始的那个。自己的实验用它的文件夹路径来指定。
退出码：0 通过，1 尚未通过，2 用法错误，3 实验本身有问题。`},
		"lab list": {"列出实验和你的进度", ""},
		"lab start": {"开始或继续一个实验", `开始或继续一个实验。LAB 是编号、名称，或一个文件夹的路径。

如果 --name 指定的集群没有运行，会先启动它，并让它继续运行。每个实验有自己的命名空间，
kplab kubectl 会默认使用它；stop 之后恢复为默认命名空间。同一时间只进行一个实验：
前一个会被收起，进度保留。

实验就是程序：只运行你信任的实验。`},
		"lab status": {"显示正在进行的实验和进度", ""},
		"lab text":   {"再次显示实验和当前步骤的文字", ""},
		"lab check": {"检查当前步骤是否完成，并说明还缺什么", `检查当前步骤是否完成，并说明还缺什么。看的是网络和 API 的实际行为，会尝试几秒钟；
怎么做到的并不重要。完成时退出码为 0，尚未完成时为 1。`},
		"lab hint":  {"显示当前步骤的下一条提示", ""},
		"lab solve": {"演示当前步骤的做法；凭证中会注明", ""},
		"lab reset": {"重新开始实验；加 --step 只重新开始当前步骤", ""},
		"lab stop":  {"收起实验：它创建的东西会删除，进度保留", ""},
		"lab verify": {"证明实验有效：做之前检查不通过，做之后通过（供作者使用）", `对每一步证明：解答之前检查不通过，每个错误答案之后也不通过，解答之后通过；
对实验列出的每种代理模式都如此；并且每个检查至少失败过一次。

它会为此启动一个集群，结束后删除。给出 --name 时就使用那个集群，并让它继续运行。
退出码 3 表示实验有问题。`},
		"lab new": {"写出一个小实验的文件夹，作为编写自己的实验的起点", ""},
		"lab receipt": {"用老师给的密钥，把通过的内容写成 JSON 凭证", `把通过的内容写成 JSON，并用老师给你的密钥附上 HMAC。
老师用 kplab lab receipt verify FILE --key KEYFILE 检查。
它证明凭证是 kplab 在持有密钥的机器上写的；那台机器上的 root 仍然可以伪造。`},
		"lab receipt verify": {"检查凭证是否由该密钥写成，以及是否是同一个实验", ""},
	}
}

// chineseFlags are the flags of the lab commands in Chinese.
func chineseFlags() map[string]string {
	return map[string]string{
		"kubeconfig": "改用此 kubeconfig 的集群；需要进入节点的步骤会跳过",
		"lang":       "语言：en 或 zh（默认取自 LC_ALL、LC_MESSAGES 或 LANG）",
		"name":       "集群的名称（也可用 $KPLAB_LAB）",
		"seed":       "用这个数字改变名称、端口和故障（0 表示各取第一个）",
		"output":     "输出格式：json 或 junit，留空为文本",
		"step":       "回到当前步骤的开头；已通过的保留",
		"all":        "所有内置实验",
		"mode":       "只在这些代理模式下（默认：实验列出的模式）",
		"patience":   "必须不通过的检查要尝试多久",
		"skip-wrong": "不试错误答案",
		"key":        "存放密钥的文件",
		"file":       "写入此文件，而不是标准输出",
		"lab":        "实验的文件夹（不是内置实验时）",
		"help":       "帮助",
	}
}

// inChinese turns the help of a command and of those below it to Chinese.
func inChinese(cmd *cobra.Command) {
	texts, flags := chineseHelp(), chineseFlags()
	for _, c := range append([]*cobra.Command{cmd}, cmd.Commands()...) {
		_, path, _ := strings.Cut(c.CommandPath(), " ")
		if t, ok := texts[path]; ok {
			c.Short = t[0]
			if t[1] != "" {
				c.Long = t[1]
			}
		}
	}
	translate := func(f *pflag.Flag) {
		if t, ok := flags[f.Name]; ok {
			f.Usage = t
		}
	}
	cmd.InitDefaultHelpFlag()
	cmd.LocalFlags().VisitAll(translate)
	cmd.InheritedFlags().VisitAll(translate)
}
