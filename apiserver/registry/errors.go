// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// errNotA is the error of a stored object that has another type than its key.
func errNotA(what string, obj runtime.Object) error {
	return fmt.Errorf("stored object is a %T, not a %s", obj, what)
}

// errUID is the error of a precondition that means an earlier object of the
// same name.
func errUID(want, have types.UID) error {
	return fmt.Errorf("the UID in the precondition (%s) does not match the UID in record (%s). The object might have been deleted and then recreated", want, have)
}
