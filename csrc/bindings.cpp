// The module tnt_kernels._ops: how it was built, and the registration of its operators.

#include <Python.h>
#include <torch/headeronly/version.h>

#include <exception>
#include <stdexcept>
#include <string>

#include "cpu/blas.h"

// csrc/cpu/register.cpp
namespace tnt {
std::string signatures();
void register_operators();
}  // namespace tnt

namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "g++ " __VERSION__;
#endif

// Python calls it after it has compared the signatures with the schemas, which PyTorch cannot do.
PyObject* register_operators(PyObject* module, PyObject*) {
  try {
    tnt::register_operators();
    // The choice of the BLAS is known only now.
    if (PyModule_AddStringConstant(module, "blas", tnt::blas::description().c_str()))
      return nullptr;
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ImportError, error.what());
    return nullptr;
  }
  return Py_NewRef(Py_None);
}

PyMethodDef methods[] = {
    {"register_operators", register_operators, METH_NOARGS, "Registers the operators."}, {}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_ops",
                          "The C++ operators of tnt_kernels.",
                          -1,
                          methods,
                          {},
                          {},
                          {},
                          {}};

}  // namespace

PyMODINIT_FUNC PyInit__ops() {
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  if (PyModule_AddStringConstant(module, "signatures", tnt::signatures().c_str()) ||
      PyModule_AddStringConstant(module, "extension",
                                 "built for torch 2.11 and later, with " TORCH_VERSION) ||
      PyModule_AddStringConstant(module, "compiler", kCompiler)) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
