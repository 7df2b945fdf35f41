# In place of CMake's, where there is no pkg-config: the modules of build/gpu-pack (tools/gpu/pack). A module that is not
# there is not found.
set(PKG_CONFIG_FOUND TRUE)

# pkg_check_modules(prefix QUIET IMPORTED_TARGET module), which is all that the build calls.
function(pkg_check_modules prefix quiet imported_target module)
    if(NOT EXISTS ${COX_GPU_PACK}/modules/${module})
        return()
    endif()
    file(STRINGS ${COX_GPU_PACK}/modules/${module} libraries)
    if(NOT TARGET PkgConfig::${prefix})
        add_library(PkgConfig::${prefix} INTERFACE IMPORTED GLOBAL)
        target_include_directories(PkgConfig::${prefix} INTERFACE ${COX_GPU_PACK}/include)
        target_link_directories(PkgConfig::${prefix} INTERFACE ${COX_GPU_PACK}/lib)
        target_link_libraries(PkgConfig::${prefix} INTERFACE ${libraries})
    endif()
    set(${prefix}_FOUND TRUE PARENT_SCOPE)
endfunction()
