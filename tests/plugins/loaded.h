// A function of a shared library, on Linux and on Windows.
#pragma once

#include <cstdio>
#include <cstdlib>

#ifdef _WIN32
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace adtp
{

// Put a library's function into `function`. Exits where there is no such library, or no such function in it.
template <typename F> void load(char const* library, char const* name, F& function)
{
#ifdef _WIN32
    HMODULE const opened = LoadLibraryA(library);
    void* const found = opened ? reinterpret_cast<void*>(GetProcAddress(opened, name)) : nullptr;
#else
    void* const opened = dlopen(library, RTLD_NOW);
    void* const found = opened ? dlsym(opened, name) : nullptr;
#endif
    if (!found)
    {
        std::printf("%s: %s cannot be loaded\n", library, name);
        std::exit(1);
    }
    function = reinterpret_cast<F>(found);
}

} // namespace adtp
