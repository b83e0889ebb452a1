// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
)

// presets are settings that come with the program, by the name that `up --config`
// takes: presets/NAME.yaml.
//
//go:embed presets/*.yaml
var presets embed.FS

const presetDir, presetExt = "presets", ".yaml"

// PresetNames lists the settings that come with the program.
func PresetNames() []string {
	files, _ := fs.Glob(presets, path.Join(presetDir, "*"+presetExt)) // the pattern is a good one
	for i, f := range files {
		files[i] = strings.TrimSuffix(path.Base(f), presetExt)
	}
	return files
}

// Preset returns the settings that come with the program under a name; ok is false
// when there are none.
func Preset(name string) (c Config, ok bool, err error) {
	data, err := presets.ReadFile(path.Join(presetDir, name+presetExt))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrInvalid) {
		return c, false, nil
	}
	if err == nil {
		c, err = parseConfig(data)
	}
	if err != nil {
		return c, true, fmt.Errorf("preset %s: %w", name, err)
	}
	return c, true, nil
}
